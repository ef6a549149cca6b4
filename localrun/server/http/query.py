"""Parameters of a request's query.

Pure. Does not: know what they may be.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from localrun.server.http.exchange import Exchange


def parameter(exchange: Exchange, name: str) -> str:
    """The last value of a query parameter; empty without one."""
    query: dict[str, list[str]] = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return query.get(name, [""])[-1]
