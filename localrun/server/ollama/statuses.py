"""Answers that tell how a long task goes: `{"status": ...}` lines, or with `stream: false` the last of them alone.

Runs in the task of the request. Nothing is sent before the first status, so that what is refused at once gets its own
HTTP status; an error after that is the last line of the stream.

Does not: know what the task is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from localrun.server.http.exchange import Exchange

Status = dict[str, Any]

_encode = msgspec.json.Encoder().encode


async def send(exchange: Exchange, statuses: AsyncGenerator[Status, None], *, stream: bool) -> None:
    """Runs the task to its end. Raises what it raises."""
    last: Status = {}
    async with aclosing(statuses):
        async for status in statuses:
            last = status
            if stream:
                if not exchange.started:
                    await exchange.open_stream()
                await exchange.write(_encode(status) + b"\n")
    if stream:
        await exchange.close_stream()
    else:
        await exchange.answer(_encode(last))
