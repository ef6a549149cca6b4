"""The daemon's own routes: health, snapshots, requests, cache, logs, shutdown, metrics.

Runs in the daemon's event loop. Errors are `{"error": {"code", "message", "field"}}`. The routes about models are in
`models.py`.
Does not: check Host, Origin or content types (limits.py wraps all routes), or know the other API families.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal

import msgspec

import localrun
from localrun.access.books import BY, day_of
from localrun.errors import BadRequest, DiskRefused, Forbidden, Unavailable
from localrun.server.http.access import Caller
from localrun.server.http.exchange import Exchange, parameter, whole_number
from localrun.server.http.path_redaction import redact_paths_in
from localrun.server.jobs.registry import unknown_request
from localrun.server.runtime import Runtime
from localrun.snapshot import EngineRow, LogLine, RequestRow, Snapshot, UsageReport, UsageRow

DEFAULT_HZ = 4.0
MIN_HZ = 1.0
MAX_HZ = 10.0
# Whose cells they are, where it is nobody else's business.
SOMEBODY = "other"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon is up."""

    status: Literal["ok"]
    version: str


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon is about to end."""

    status: Literal["stopping"]


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that run, wait, or ended in the last minute."""

    requests: list[RequestRow]


class CancelledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request ends within a step."""

    id: str
    cancelled: bool


async def health(runtime: Runtime, exchange: Exchange) -> None:
    if runtime.shutdown_requested.is_set():
        raise Unavailable("localrun is shutting down")
    await exchange.answer_json(Health(status="ok", version=localrun.__version__))


async def snapshot(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_redacted(shown_to(exchange.caller, await runtime.telemetry.snapshot()))


@asynccontextmanager
async def _stream(exchange: Exchange) -> AsyncIterator[None]:
    """A stream of the daemon's, which its route writes while the client is there."""
    await exchange.read_body()
    async with exchange.while_connected():
        await exchange.open_stream()
        yield
        await exchange.close_stream()


def _goes_on(runtime: Runtime, exchange: Exchange) -> bool:
    """Until the daemon ends, or the key does."""
    return not runtime.shutdown_requested.is_set() and runtime.access.still_admits(exchange.caller)


async def events(runtime: Runtime, exchange: Exchange) -> None:
    """Snapshots. A client that reads slowly gets fewer, each current."""
    interval_s = 1 / _hz(exchange)
    async with _stream(exchange):
        while _goes_on(runtime, exchange):
            if exchange.caller.is_admin:
                data = await runtime.telemetry.encoded_snapshot(interval_s / 2)
            else:
                seen = shown_to(exchange.caller, await runtime.telemetry.snapshot())
                data = _encoder.encode(redact_paths_in(msgspec.to_builtins(seen)))
            await exchange.write(b"event: snapshot\ndata: " + data + b"\n\n")
            with suppress(TimeoutError):
                await asyncio.wait_for(runtime.shutdown_requested.wait(), interval_s)


async def list_requests(runtime: Runtime, exchange: Exchange) -> None:
    rows = [row for row in runtime.registry.rows() if exchange.caller.can_see(row.key)]
    await exchange.answer_redacted(Requests(requests=rows))


async def one_request(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_redacted(_row(runtime, exchange))


async def cancel_request(runtime: Runtime, exchange: Exchange) -> None:
    job_id = _row(runtime, exchange, is_change=True).id
    runtime.registry.cancel(job_id)
    await exchange.answer_json(CancelledRequest(id=job_id, cancelled=True))


def _row(runtime: Runtime, exchange: Exchange, *, is_change: bool = False) -> RequestRow:
    """The request that the path names. Raises NotFound, for those of others as for unknown ones, and Forbidden."""
    caller, job_id = exchange.caller, exchange.path_id
    row = runtime.registry.row(job_id)
    if not caller.can_see(row.key):
        raise unknown_request(job_id)
    if is_change and row.key != caller.name and not caller.may_change:
        raise Forbidden(f"the key {caller.name!r} is read-only: it may cancel its own requests only")
    return row


def shown_to(caller: Caller, snapshot: Snapshot) -> Snapshot:
    """What somebody sees of it: of others' requests only how many there are."""
    if caller.is_admin:
        return snapshot
    requests = [row for row in snapshot.requests if caller.can_see(row.key)]
    own = {row.id for row in requests}
    return msgspec.structs.replace(
        snapshot,
        requests=requests,
        engines=[_engine_shown_to(caller, row, own) for row in snapshot.engines if caller.may_use_model(row.model)],
        batches=[row for row in snapshot.batches if caller.can_see(row.key)],
    )


def _engine_shown_to(caller: Caller, engine: EngineRow, own: set[str]) -> EngineRow:
    """Cells of others' requests are only in use."""
    runs = [
        run if run.request is None or run.request in own else msgspec.structs.replace(run, request=SOMEBODY)
        for run in engine.kv_runs
    ]
    return msgspec.structs.replace(engine, kv_runs=runs, load=caller.load_shown(engine.load))


async def cache(runtime: Runtime, exchange: Exchange) -> None:
    report = await runtime.cache.report()
    rows = [row for row in report.models if exchange.caller.may_use_model(row.model)]
    report = msgspec.structs.replace(
        report,
        models=rows,
        ram_bytes=sum(row.ram_bytes for row in rows if not row.node),
        disk_bytes=sum(row.disk_bytes for row in rows if not row.node),
    )
    await exchange.answer_redacted(report)


async def clear_cache(runtime: Runtime, exchange: Exchange) -> None:
    tier = parameter(exchange, "tier")
    if tier not in ("", "ram", "disk"):
        raise BadRequest(f"tier must be ram or disk, not {tier[:40]!r}; leave it out for both", field="tier")
    model = parameter(exchange, "model")
    await exchange.answer_json(await runtime.cache.clear(model or None, ram=tier != "disk", disk=tier != "ram"))


async def shutdown(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(Stopping(status="stopping"))
    runtime.request_shutdown()


async def metrics(runtime: Runtime, exchange: Exchange) -> None:
    page, content_type = await runtime.metrics_page(exchange.header(b"accept"))
    # The second one is llama-server's.
    started = str(int(runtime.telemetry.started_at_s)).encode("ascii")
    headers = [(b"content-type", content_type.encode("ascii")), (b"process-start-time-unix", started)]
    await exchange.answer(page, headers=headers)


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


# How long the daemon's end may go unnoticed by a reader.
_TURN_S = 1.0
MAX_LINE = 10**18 - 1
# A burst is sent in pieces of so many lines, so that no single write is large.
_LINES_PER_WRITE = 100

_encoder = msgspec.json.Encoder()


async def logs(runtime: Runtime, exchange: Exchange) -> None:
    number = whole_number(exchange, "since", default=0, most=MAX_LINE, least=0)
    follow = parameter(exchange, "follow") or "1"
    if follow not in ("0", "1"):
        raise BadRequest.of("follow", f"must be 0 or 1, not {follow[:40]!r}")
    async with _stream(exchange):
        while True:
            lines = runtime.logs.since(number)
            for at in range(0, len(lines), _LINES_PER_WRITE):
                await exchange.write(b"".join(map(_event, lines[at : at + _LINES_PER_WRITE])))
            number = lines[-1].number if lines else number
            if follow == "0" or not _goes_on(runtime, exchange):
                break
            await runtime.logs.wait(number, _TURN_S)


def _event(line: LogLine) -> bytes:
    return b"event: log\ndata: " + _encoder.encode(line) + b"\n\n"


async def traffic(runtime: Runtime, exchange: Exchange) -> None:
    listener = runtime.traffic.listen()
    try:
        async with _stream(exchange):
            while _goes_on(runtime, exchange):
                with suppress(TimeoutError):
                    row = await asyncio.wait_for(listener.rows.get(), _TURN_S)
                    await exchange.write(b"event: request\ndata: " + _encoder.encode(row) + b"\n\n")
    finally:
        runtime.traffic.leave(listener)


DEFAULT_DAYS = 30
MAX_DAYS = 3660


async def usage(runtime: Runtime, exchange: Exchange) -> None:
    by = parameter(exchange, "by") or "key"
    if by not in BY:
        raise BadRequest(f"by must be one of {', '.join(BY)}, not {by[:40]!r}", field="by")
    days = whole_number(exchange, "days", default=DEFAULT_DAYS, most=MAX_DAYS)
    since = day_of(time.time() - (days - 1) * 86400)
    caller = exchange.caller
    key = None if caller.is_admin else caller.name
    try:
        totals = await runtime.access.books.totals(by, since, key)
    except sqlite3.Error as error:
        raise DiskRefused(f"{runtime.access.usage.path} cannot be read: {error}") from None
    rows = [UsageRow(**total._asdict()) for total in totals]
    await exchange.answer_redacted(UsageReport(by=by, since=since, rows=rows))
