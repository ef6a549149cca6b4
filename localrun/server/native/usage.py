"""What keys used, and what is left of the one that asks.

    GET /localrun/v1/usage?by=key&days=30   {"by", "since", "rows": [{"name", "requests", "prompt_tokens",
                                            "cached_tokens", "output_tokens"}]}; `by` is key, day or model

Whoever is no admin sees the own key's use. What programs on this machine use without a key is `local`'s. Does not:
count (`http/access.py` does).
"""

from __future__ import annotations

import asyncio
import sqlite3
import time

from starlette.routing import Route

from localrun.access.usage import BY, day_of
from localrun.errors import BadRequest, DiskRefused
from localrun.server.http.exchange import Exchange, parameter, route
from localrun.server.runtime import Runtime
from localrun.snapshot import UsageReport, UsageRow

DEFAULT_DAYS = 30
MAX_DAYS = 3660


def routes(runtime: Runtime) -> list[Route]:
    """The route, bound to a runtime."""
    return [route("/localrun/v1/usage", runtime, _usage, methods=["GET"])]


async def _usage(runtime: Runtime, exchange: Exchange) -> None:
    by = parameter(exchange, "by") or "key"
    if by not in BY:
        raise BadRequest(f"by must be one of {', '.join(BY)}, not {by[:40]!r}", field="by")
    days = _days(exchange)
    since = day_of(time.time() - (days - 1) * 86400)
    visitor = exchange.visitor
    key = None if visitor.is_admin else visitor.name
    try:
        totals = await asyncio.to_thread(runtime.access.usage.totals, by, since_day=since, key=key)
    except sqlite3.Error as error:
        raise DiskRefused(f"{runtime.access.usage.path} cannot be read: {error}") from None
    rows = [UsageRow(**total._asdict()) for total in totals]
    await exchange.answer_facts(UsageReport(by=by, since=since, rows=rows))


def _days(exchange: Exchange) -> int:
    text = parameter(exchange, "days") or str(DEFAULT_DAYS)
    days = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= days <= MAX_DAYS:
        raise BadRequest(f"days must be a number from 1 to {MAX_DAYS}, not {text[:40]!r}", field="days")
    return days
