"""The daemon's log as a route.

    GET /localrun/v1/logs?since=N    Server-Sent Events, `event: log`, one LogLine each: what is kept with a number
                                     above N, then what comes. `follow=0` ends after what is kept.

Runs in the daemon's event loop. Does not: filter; a reader knows what it wants to see.
"""

from __future__ import annotations

import msgspec
from starlette.routing import Route

from localrun.errors import BadRequest
from localrun.server.http.endpoint import route
from localrun.server.http.exchange import Exchange
from localrun.server.http.query import parameter
from localrun.server.runtime import Runtime
from localrun.snapshot import LogLine

# How long the daemon's end may go unnoticed by a reader.
_TURN_S = 1.0
# A burst is sent in pieces of so many lines, so that no single write is large.
_LINES_PER_WRITE = 100

_encoder = msgspec.json.Encoder()


def routes(runtime: Runtime) -> list[Route]:
    """The route, bound to a runtime."""
    return [route("/localrun/v1/logs", runtime, _logs, methods=["GET"])]


async def _logs(runtime: Runtime, exchange: Exchange) -> None:
    since, follow = parameter(exchange, "since") or "0", parameter(exchange, "follow") or "1"
    if not since.isascii() or not since.isdigit() or len(since) > 18:
        raise BadRequest(f"since: must be the number of a line, not {since[:40]!r}", field="since")
    if follow not in ("0", "1"):
        raise BadRequest(f"follow: must be 0 or 1, not {follow[:40]!r}", field="follow")
    number = int(since)
    await exchange.read_body()
    async with exchange.while_connected():
        await exchange.open_stream()
        while True:
            lines = runtime.logs.since(number)
            for at in range(0, len(lines), _LINES_PER_WRITE):
                await exchange.write(b"".join(map(_event, lines[at : at + _LINES_PER_WRITE])))
            number = lines[-1].number if lines else number
            if follow == "0" or runtime.shutdown_requested.is_set():
                break
            await runtime.logs.wait(number, _TURN_S)
        await exchange.close_stream()


def _event(line: LogLine) -> bytes:
    return b"event: log\ndata: " + _encoder.encode(line) + b"\n\n"
