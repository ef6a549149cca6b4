"""Uploads to a disk that fills up on the way."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from localrun.server.ollama import blobs, routes

N_FREE_PIECES = 3


@pytest.mark.parametrize("announced", [True, False])
async def test_the_reserve_is_kept_whether_or_not_the_length_is_announced(
    running: Any, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    n_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal n_sent
        for _ in range(20):
            n_sent += 1
            yield bytes(blobs.PIECE_BYTES)

    async with running() as runtime:
        folder = runtime.store.blobs.folder

        def disk_usage(_: object) -> SimpleNamespace:
            used_bytes = sum(file.stat().st_size for file in folder.iterdir())
            return SimpleNamespace(free=blobs.RESERVE_BYTES + N_FREE_PIECES * blobs.PIECE_BYTES - used_bytes)

        monkeypatch.setattr(blobs.shutil, "disk_usage", disk_usage)
        digest = hashlib.sha256(bytes(20 * blobs.PIECE_BYTES)).hexdigest()
        headers = {"content-length": str(20 * blobs.PIECE_BYTES)} if announced else {}
        transport = httpx2.ASGITransport(app=Starlette(routes=routes.routes(runtime)))
        async with httpx2.AsyncClient(base_url="http://localhost", transport=transport) as client:
            answer = await client.post(f"/api/blobs/sha256:{digest}", content=pieces(), headers=headers)
        assert answer.status_code == 507
        assert "LOCALRUN_MODELS" in answer.json()["error"]
        assert n_sent == (0 if announced else N_FREE_PIECES + 1)
        assert list(folder.iterdir()) == []
