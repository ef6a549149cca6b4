"""What a loaded model's row says, and when a file counts as another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from localrun.config import latency_target_s
from localrun.server.engines.resident import FileStamp


def test_a_stamp_tells_a_replaced_or_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    first = FileStamp.of(path)
    assert FileStamp.of(path) == first
    os.utime(path, (1, 1))
    assert FileStamp.of(path) != first
    (tmp_path / "n.gguf").write_bytes(b"one")
    os.replace(tmp_path / "n.gguf", path)
    assert FileStamp.of(path) != first
    path.unlink()
    with pytest.raises(OSError):  # noqa: PT011 - any of them
        FileStamp.of(path)


async def test_a_row_from_loading_to_idle(supervising: Any) -> None:
    async with supervising(keep_alive_s=50, slots=3) as (supervisor, _):
        lease = await supervisor.acquire("alpha", 70)
        busy = supervisor.loaded()[0]
        assert (busy.state, busy.pid, busy.slots, busy.n_ctx) == ("ready", lease.link.pid, 3, 3 * 1536)
        assert busy.expires_in_s == 70, "all of it is still to come"
        assert busy.target_itl_s == latency_target_s("balanced")
        lease.release()
        idle = supervisor.loaded()[0]
        assert idle.expires_in_s is not None
        assert 60 < idle.expires_in_s <= 70
        (await supervisor.acquire("alpha", float("inf"))).release()
        assert supervisor.loaded()[0].expires_in_s is None


async def test_the_latency_mode_shows_as_a_target(supervising: Any) -> None:
    async with supervising(latency="throughput") as (supervisor, _):
        (await supervisor.acquire("alpha", None)).release()
        assert supervisor.loaded()[0].target_itl_s == latency_target_s("throughput")
