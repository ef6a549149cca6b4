"""The daemon's own routes over real HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from localrun import __version__
from localrun.server.jobs.job import JobRequest
from localrun.server.native import routes as native
from localrun.server.openapi.operations import routes
from localrun.server.runtime import Runtime
from localrun.snapshot import CacheReport, LogLine, RequestState, Snapshot


@pytest.fixture
def serving(running: Any) -> Callable[..., Any]:
    """`async with serving() as (runtime, client)`: the native routes on a port of their own."""

    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[tuple[Runtime, httpx2.AsyncClient]]:
        async with running(**changes) as runtime:
            listener = socket.create_server(("127.0.0.1", 0))
            app = Starlette(routes=routes(runtime))
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx2.AsyncClient(base_url=base_url, timeout=20, trust_env=False) as client:
                    yield runtime, client
            finally:
                runtime.request_shutdown()
                server.should_exit = True
                await task
                listener.close()

    return start


async def test_health(serving: Any) -> None:
    async with serving() as (runtime, client):
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "version": __version__})
        runtime.request_shutdown()
        answer = await client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"


async def test_a_snapshot_is_the_struct_that_clients_decode(serving: Any, generate: Any) -> None:
    async with serving() as (runtime, client):
        await generate(runtime, client="editor")
        snapshot = msgspec.json.decode((await client.get("/localrun/v1/snapshot")).content, type=Snapshot)
        assert snapshot.version == __version__
        assert [row.client for row in snapshot.requests] == ["editor"]
        assert [row.model for row in snapshot.engines] == ["alpha"]


async def test_requests_are_listed_shown_and_cancelled(serving: Any, submit: Any) -> None:
    async with serving(step_ms=2) as (runtime, client):
        async with runtime.job(JobRequest(model="alpha", api="/api/chat")) as job:
            await submit(job, n_predict=100_000)
            await anext(job)
            rows = (await client.get("/localrun/v1/requests")).json()["requests"]
            assert [(row["id"], row["state"]) for row in rows] == [(job.id, "decode")]
            assert (await client.get(f"/localrun/v1/requests/{job.id}")).json()["model"] == "alpha"
            answer = await client.delete(f"/localrun/v1/requests/{job.id}")
            assert (answer.status_code, answer.json()) == (200, {"id": job.id, "cancelled": True})
            async for _ in job:
                pass
        assert job.record.state is RequestState.CANCELLED
        again = await client.delete(f"/localrun/v1/requests/{job.id}")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
        for call in (client.get, client.delete):
            unknown = await call("/localrun/v1/requests/req_0")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
            assert unknown.headers["x-localrun-error"] == "not_found"


async def test_events_come_at_the_asked_rate_and_show_what_happens(serving: Any, generate: Any) -> None:
    async with (
        serving() as (runtime, client),
        client.stream("GET", "/localrun/v1/events?hz=10") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        snapshots: list[Snapshot] = []
        lines = answer.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                snapshots.append(msgspec.json.decode(line[6:], type=Snapshot))
                if len(snapshots) == 2:
                    await generate(runtime)
            else:
                assert line in ("event: snapshot", "")
            # What was sent while the request ran, however long that took, is read after it.
            if len(snapshots) >= 8 and snapshots[-1].aggregate.requests_total:
                break
        assert snapshots[0].aggregate.requests_total == 0
        assert snapshots[-1].aggregate.requests_total == 1
        passed_s = snapshots[-1].time_s - snapshots[0].time_s
        assert passed_s > (len(snapshots) - 1) * 0.1 * 0.8, "not more often than asked"


async def test_events_stop_when_the_client_goes(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (runtime, client):
        looks = 0
        encoded = runtime.telemetry.encoded_snapshot

        async def counted(max_age_s: float) -> bytes:
            nonlocal looks
            looks += 1
            return await encoded(max_age_s)

        monkeypatch.setattr(runtime.telemetry, "encoded_snapshot", counted)
        async with client.stream("GET", "/localrun/v1/events?hz=10") as answer:
            await anext(answer.aiter_lines())
        before = 0
        async with asyncio.timeout(60):
            while looks > before:
                before = looks
                await asyncio.sleep(0.5)


async def test_events_end_at_shutdown_without_waiting_for_the_next(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "MIN_HZ", 1e-6)
    async with serving() as (runtime, client), client.stream("GET", "/localrun/v1/events?hz=1e-6") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        runtime.request_shutdown()
        rest = [line async for line in lines]
        assert not any(line.startswith("event:") for line in rest)


@pytest.mark.parametrize("hz", ["0", "11", "nan", "inf", "-1", "often", "1e999"])
async def test_a_rate_out_of_range_is_refused_by_name(serving: Any, hz: str) -> None:
    async with serving() as (_, client):
        answer = await client.get("/localrun/v1/events", params={"hz": hz})
        assert answer.status_code == 400
        assert answer.json()["error"]["field"] == "hz"


async def test_shutdown_asks_the_daemon_to_end(serving: Any) -> None:
    async with serving() as (runtime, client):
        answer = await client.post("/localrun/v1/shutdown", json={})
        assert answer.status_code == 200
        assert runtime.shutdown_requested.is_set()


async def test_metrics_parse(serving: Any, generate: Any) -> None:
    async with serving() as (runtime, client):
        await generate(runtime)
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        families = {family.name: family.type for family in text_string_to_metric_families(answer.text)}
        assert families["localrun_time_to_first_token_seconds"] == "histogram"
        assert families["localrun_requests"] == "counter"
        assert families["localrun_kv_cells_used"] == "gauge"


async def test_the_wrong_method_is_405(serving: Any) -> None:
    async with serving() as (_, client):
        assert (await client.get("/localrun/v1/shutdown")).status_code == 405
        assert (await client.post("/localrun/v1/events", json={})).status_code == 405


async def test_the_cache_is_shown_and_cleared(serving: Any) -> None:
    async with serving() as (runtime, client):
        lease = await runtime.supervisor.acquire("alpha", None)
        report = msgspec.json.decode((await client.get("/localrun/v1/cache")).content, type=CacheReport)
        assert [row.model for row in report.models] == ["alpha"]
        assert report.disk_limit_bytes == runtime.settings.disk_cache_bytes
        for query in ("", "?model=alpha", "?tier=ram", "?model=alpha:latest&tier=disk"):
            answer = await client.delete(f"/localrun/v1/cache{query}")
            assert (answer.status_code, answer.json()) == (200, {"ram_bytes": 0, "disk_bytes": 0})
        lease.release()
        answer = await client.delete("/localrun/v1/cache?tier=paper")
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "tier")
        answer = await client.delete("/localrun/v1/cache?model=nonesuch")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def _lines(text: str) -> list[LogLine]:
    return [msgspec.json.decode(line[5:], type=LogLine) for line in text.splitlines() if line.startswith("data:")]


async def test_what_is_kept_and_what_comes(serving: Any) -> None:
    log = logging.getLogger("localrun.test")
    async with serving() as (_, client):
        log.warning("first %d", 1)
        logging.getLogger("localrun.engine").warning("[tiny] n_ctx = 4096")
        kept = _lines((await client.get("/localrun/v1/logs?follow=0")).text)
        assert [(line.source, line.level, line.text) for line in kept[-2:]] == [
            ("localrun.test", "warning", "first 1"),
            ("tiny", "warning", "n_ctx = 4096"),
        ]
        since = kept[-1].number
        async with client.stream("GET", f"/localrun/v1/logs?since={since}") as response:
            chunks = response.aiter_text()
            await asyncio.to_thread(log.error, "from another thread")
            text = ""
            while "from another thread" not in text:
                text += await anext(chunks)
        assert [line.number for line in _lines(text)] == [since + 1]


async def test_bad_parameters_are_named(serving: Any) -> None:
    async with serving() as (_, client):
        for query, field in (("since=-1", "since"), ("since=x", "since"), ("follow=2", "follow")):
            answer = await client.get(f"/localrun/v1/logs?{query}")
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


async def test_a_broken_record_harms_nobody_and_a_long_one_is_cut(serving: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log = logging.getLogger("localrun.test")
    async with serving() as (_, client):
        log.warning("%d", "not a number")
        log.warning("x" * 100_000)
        kept = _lines((await client.get("/localrun/v1/logs?follow=0")).text)
        assert len(kept[-1].text) == 4_000


@pytest.mark.parametrize("path", ["/localrun/v1/events", "/localrun/v1/logs"])
async def test_the_head_of_a_stream_is_all_of_it(serving: Any, path: str) -> None:
    """And the connection is free for the next request."""
    async with serving() as (_, client):
        for _ in range(3):
            answer = await client.head(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
