"""Who asks, from the request's headers: the client's name and its lane.

The name is what people see in the request table and what fairness is counted by; it proves nothing.
"""

from __future__ import annotations

import re

from localrun.errors import BadRequest
from localrun.server.http.exchange import Exchange
from localrun.server.jobs.job import Ask
from localrun.wire import Lane

MAX_CLIENT_CHARACTERS = 64

_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+", re.ASCII)


def ask(exchange: Exchange, model: str, *, keep_alive_s: float | None = None) -> Ask:
    """What to ask the runtime for. Raises BadRequest for an unknown lane."""
    return Ask(model=model, api=exchange.path, client=client(exchange), lane=lane(exchange), keep_alive_s=keep_alive_s)


def lane(exchange: Exchange) -> Lane:
    """`X-Localrun-Lane`, else the default lane."""
    name = exchange.header(b"x-localrun-lane").strip().lower()
    if not name:
        return Lane.DEFAULT
    if name not in set(Lane):
        raise BadRequest(
            f"X-Localrun-Lane: {name[:40]!r} is not a lane; use {', '.join(Lane)}", field="X-Localrun-Lane"
        )
    return Lane(name)


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
