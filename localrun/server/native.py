"""The daemon's own routes: health, snapshots, requests, cache, shutdown, metrics.

    GET    /health                      {"status": "ok", "version": ...}; 503 while shutting down
    GET    /localrun/v1/snapshot        one Snapshot
    GET    /localrun/v1/events?hz=4     Server-Sent Events, `event: snapshot`, 1 to 10 a second
    GET    /localrun/v1/requests        {"requests": [RequestRow, ...]}
    GET    /localrun/v1/requests/ID     RequestRow
    DELETE /localrun/v1/requests/ID     cancels it: {"id": ..., "cancelled": true}; 404 unknown, 409 has ended
    GET    /localrun/v1/cache           CacheReport: what is kept of each model's prompts
    DELETE /localrun/v1/cache           CacheCleared: forgets it; ?model=NAME for one model, ?tier=ram or disk
    GET    /localrun/v1/logs            Server-Sent Events, `event: log` (see logs.py)
    GET    /localrun/v1/fit             how a model would be opened here: ?model=NAME (fit.py)
    POST   /localrun/v1/shutdown        asks the daemon to end: {"status": "stopping"}
    GET    /metrics                     Prometheus

Runs in the daemon's event loop. Errors are `{"error": {"code", "message", "field"}}`.

Does not: check Host, Origin or content types (limits.py wraps all routes), or know the other API families.
"""

from __future__ import annotations

import asyncio

from starlette.routing import Route

import localrun
from localrun.errors import BadRequest, Unavailable
from localrun.server import fit, garbage, logs, pull_routes
from localrun.server.http.endpoint import route
from localrun.server.http.exchange import Exchange
from localrun.server.http.query import parameter
from localrun.server.runtime import Runtime

DEFAULT_HZ = 4.0
MIN_HZ = 1.0
MAX_HZ = 10.0


def routes(runtime: Runtime) -> list[Route]:
    """The routes, bound to a runtime."""
    return [
        route("/health", runtime, _health, methods=["GET"]),
        route("/localrun/v1/snapshot", runtime, _snapshot, methods=["GET"]),
        route("/localrun/v1/events", runtime, _events, methods=["GET"]),
        route("/localrun/v1/requests", runtime, _list_requests, methods=["GET"]),
        route("/localrun/v1/requests/{id}", runtime, _one_request, methods=["GET"]),
        route("/localrun/v1/requests/{id}", runtime, _cancel_request, methods=["DELETE"]),
        route("/localrun/v1/cache", runtime, _cache, methods=["GET"]),
        route("/localrun/v1/cache", runtime, _clear_cache, methods=["DELETE"]),
        route("/localrun/v1/shutdown", runtime, _shutdown, methods=["POST"]),
        *pull_routes.routes(runtime),
        *garbage.routes(runtime),
        *fit.routes(runtime),
        *logs.routes(runtime),
        route("/metrics", runtime, _metrics, methods=["GET"]),
    ]


async def _health(runtime: Runtime, exchange: Exchange) -> None:
    if runtime.shutdown_requested.is_set():
        raise Unavailable("localrun is shutting down")
    await exchange.answer_json({"status": "ok", "version": localrun.__version__})


async def _snapshot(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(await runtime.telemetry.snapshot())


async def _events(runtime: Runtime, exchange: Exchange) -> None:
    """Snapshots until the client goes away or the daemon ends. One that reads slowly gets fewer, each current."""
    interval_s = 1 / _hz(exchange)
    await exchange.read_body()
    async with exchange.while_connected():
        await exchange.open_stream()
        while not runtime.shutdown_requested.is_set():
            data = await runtime.telemetry.encoded_snapshot(interval_s / 2)
            await exchange.write(b"event: snapshot\ndata: " + data + b"\n\n")
            await _pause(runtime.shutdown_requested, interval_s)
        await exchange.close_stream()


async def _list_requests(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json({"requests": runtime.registry.rows()})


async def _one_request(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(runtime.registry.row(exchange.scope["path_params"]["id"]))


async def _cancel_request(runtime: Runtime, exchange: Exchange) -> None:
    job_id: str = exchange.scope["path_params"]["id"]
    runtime.registry.cancel_or_raise(job_id)
    await exchange.answer_json({"id": job_id, "cancelled": True})


async def _cache(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(await runtime.cache.report())


async def _clear_cache(runtime: Runtime, exchange: Exchange) -> None:
    tier = parameter(exchange, "tier")
    if tier not in ("", "ram", "disk"):
        raise BadRequest(f"tier must be ram or disk, not {tier[:40]!r}; leave it out for both", field="tier")
    model = parameter(exchange, "model")
    await exchange.answer_json(await runtime.cache.clear(model or None, ram=tier != "disk", disk=tier != "ram"))


async def _shutdown(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json({"status": "stopping"})
    runtime.request_shutdown()


async def _metrics(runtime: Runtime, exchange: Exchange) -> None:
    page, content_type = runtime.telemetry.metrics.page(exchange.header(b"accept"))
    await exchange.answer(page, headers=[(b"content-type", content_type.encode("ascii"))])


async def _pause(ended: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(ended.wait(), seconds)
    except TimeoutError:
        return


def _hz(exchange: Exchange) -> float:
    text = parameter(exchange, "hz")
    if not text:
        return DEFAULT_HZ
    try:
        hz = float(text)
    except ValueError:
        hz = 0.0
    if not MIN_HZ <= hz <= MAX_HZ:
        raise BadRequest(f"hz must be a number from {MIN_HZ:g} to {MAX_HZ:g}, not {text[:40]!r}", field="hz")
    return hz
