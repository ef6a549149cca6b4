"""The route that explains how a model would be opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from localrun.server.engines import machine
from localrun.server.native import models as fit
from localrun.server.openapi.operations import routes
from localrun.server.runtime import Runtime


@pytest.fixture
def serving(running: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[tuple[Runtime, httpx2.AsyncClient]]:
        async with running(**changes) as runtime:
            transport = httpx2.ASGITransport(app=Starlette(routes=routes(runtime)))
            async with httpx2.AsyncClient(base_url="http://localhost", transport=transport) as client:
                yield runtime, client

    return start


async def test_it_is_what_a_request_would_load(serving: Any) -> None:
    async with serving(slots=2, kv_cells=0, gpu_layers=0) as (runtime, client):
        answer = (await client.get("/localrun/v1/fit?model=alpha")).json()
        lease = await runtime.supervisor.acquire("alpha", None)
        placement = runtime.supervisor.residents()[0].placement
        assert placement is not None
        assert (answer["kv_cells"], answer["kv_type"]) == (placement.n_kv_cells, placement.kv_type)
        assert (answer["slots"], lease.link.ready.n_slots) == (2, 2)
        assert answer["total_bytes"] == placement.needed_bytes
        lease.release()


async def test_the_parts_add_up(serving: Any) -> None:
    async with serving() as (_, client):
        answer = (await client.get("/localrun/v1/fit?model=alpha")).json()
        assert answer["fits"]
        assert answer["problem"] is None
        (ram,) = answer["devices"]
        parts = [ram[f"{part}_bytes"] for part in ("weights", "kv", "compute", "other")]
        assert sum(parts) == ram["total_bytes"] == answer["total_bytes"]
        assert ram["total_bytes"] <= ram["usable_bytes"] <= ram["free_bytes"]
        assert ram["layers"] == answer["layers"] == 5


async def test_what_does_not_fit_is_explained_and_no_error(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (runtime, client):
        monkeypatch.setattr(runtime.supervisor._room, "_available_bytes", lambda: 1_000_000)
        response = await client.get("/localrun/v1/fit?model=alpha")
        answer = response.json()
        assert (response.status_code, answer["fits"]) == (200, False)
        assert "close other programs" in answer["problem"]


async def test_what_idle_models_hold_counts_as_free(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "private_bytes", lambda pid: 5_000_000)
    async with serving() as (runtime, client):
        lease = await runtime.supervisor.acquire("alpha", None)
        assert (await client.get("/localrun/v1/fit?model=beta")).json()["idle_bytes"] == 0
        assert (await client.get("/localrun/v1/fit?model=alpha")).json()["idle_bytes"] == 5_000_000
        lease.release()
        assert (await client.get("/localrun/v1/fit?model=beta")).json()["idle_bytes"] == 5_000_000


async def test_unknown_models_and_none_are_refused(serving: Any) -> None:
    async with serving() as (_, client):
        assert (await client.get("/localrun/v1/fit?model=nobody")).status_code == 404
        assert (await client.get("/localrun/v1/fit")).status_code == 400


async def test_the_gpus_are_asked_by_one_request_at_a_time(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n_asked = n_at_once = most_at_once = 0

    async def installed_gpus() -> tuple[Any, ...]:
        nonlocal n_asked, n_at_once, most_at_once
        n_asked += 1
        n_at_once += 1
        most_at_once = max(most_at_once, n_at_once)
        await asyncio.sleep(0)
        n_at_once -= 1
        return ()

    monkeypatch.setattr(fit, "answering_gpus", installed_gpus)
    async with serving() as (_, client):
        answers = await asyncio.gather(*(client.get("/localrun/v1/fit?model=alpha") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert (n_asked, most_at_once) == (8, 1)
