"""Who asks, and how it is to be served, from the request's headers and body.

The client's name is what people see in the request table and what fairness is counted by; it proves nothing. Lane,
latency and deadline may come as headers or as fields of the body; the body's count where both are given, because the
headers are what a client is set up with once.
"""

from __future__ import annotations

import math
import re

from localrun.config import ConfigError, latency_target_s
from localrun.errors import BadRequest
from localrun.server.engines.use import Use
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import ServiceFields
from localrun.server.jobs.job import Ask
from localrun.wire import Lane

MAX_CLIENT_CHARACTERS = 64
MAX_DEADLINE_S = 86_400.0

_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+", re.ASCII)
_MAX_QUOTED = 40


def ask(
    exchange: Exchange,
    model: str,
    *,
    keep_alive_s: float | None = None,
    fields: ServiceFields | None = None,
    use: Use = Use.TEXT,
) -> Ask:
    """What to ask the runtime for. Raises BadRequest for a lane, a latency or a deadline that is none."""
    wanted = fields or ServiceFields()
    return Ask(
        model=model,
        api=exchange.path,
        client=client(exchange),
        lane=lane(exchange, wanted.lane),
        target_itl_s=target_itl_s(exchange, wanted.latency),
        deadline_s=deadline_s(exchange, wanted.deadline_s),
        keep_alive_s=keep_alive_s,
        use=use,
    )


def lane(exchange: Exchange, field: str | None = None) -> Lane:
    """`lane` or `X-Localrun-Lane`, else the default lane."""
    where, text = _where(exchange, "lane", field, "X-Localrun-Lane")
    name = text.strip().lower()
    if not name:
        return Lane.DEFAULT
    if name not in set(Lane):
        raise BadRequest(f"{where}: {name[:_MAX_QUOTED]!r} is not a lane; use {', '.join(Lane)}", field=where)
    return Lane(name)


def target_itl_s(exchange: Exchange, field: str | float | None = None) -> float | None:
    """`latency` or `X-Localrun-Latency`, a mode or a number of milliseconds, as seconds; 0 is no limit, None is the
    daemon's setting."""
    where, text = _where(exchange, "latency", field, "X-Localrun-Latency")
    name = text.strip().lower()
    if not name:
        return None
    try:
        return latency_target_s(name[:_MAX_QUOTED])
    except ConfigError as error:
        raise BadRequest(f"{where}: {error}", field=where) from None


def deadline_s(exchange: Exchange, field: float | None = None) -> float | None:
    """`deadline_s` or `X-Localrun-Deadline`: seconds from the request's arrival; None without one."""
    where, text = _where(exchange, "deadline_s", field, "X-Localrun-Deadline")
    if not text.strip():
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise BadRequest(
            f"{where}: {text[:_MAX_QUOTED]!r} is not a deadline; use a number of seconds up to {MAX_DEADLINE_S:.0f}",
            field=where,
        )
    return seconds


def _where(exchange: Exchange, name: str, field: str | float | None, header: str) -> tuple[str, str]:
    """What was said, and by which name."""
    if field is not None:
        return name, str(field)
    return header, exchange.header(header.lower().encode("ascii"))


def client(exchange: Exchange) -> str:
    """`X-Localrun-Client`, else the product in the User-Agent, else the peer's address."""
    named = _printable(exchange.header(b"x-localrun-client"))
    if named:
        return named
    product = _printable(exchange.header(b"user-agent")).partition(" ")[0].partition("/")[0]
    if product:
        return product
    peer = exchange.scope.get("client")
    return str(peer[0]) if peer else ""


def _printable(text: str) -> str:
    return _NOT_PRINTABLE.sub(" ", text).strip()[:MAX_CLIENT_CHARACTERS]
