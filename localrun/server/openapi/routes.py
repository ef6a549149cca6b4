"""`/openapi.json`, `/docs` and `/docs/{name}`.

Runs in the daemon's event loop; the document is made in a thread when it is first asked for.

Does not: describe anything; `document.py` and `page.py` do.
"""

from __future__ import annotations

import asyncio
import re
from functools import cache

import msgspec
from starlette.routing import Route

from localrun.server.http.exchange import Exchange, route
from localrun.server.http.failures import Headers
from localrun.server.openapi import page
from localrun.server.openapi.document import document
from localrun.server.openapi.page import CONTENT_POLICY, rendered
from localrun.server.runtime import Runtime

_HTML: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", CONTENT_POLICY),
    (b"referrer-policy", b"no-referrer"),
]
_HOST = re.compile(r"[0-9A-Za-z.:\[\]-]{1,100}", re.ASCII)


def routes(runtime: Runtime) -> list[Route]:
    """The routes, bound to a runtime."""
    return [
        route("/openapi.json", runtime, _openapi, methods=["GET"]),
        route("/docs", runtime, _docs, methods=["GET"]),
        route("/docs/{name}", runtime, _page, methods=["GET"]),
    ]


async def _openapi(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer(await asyncio.to_thread(_encoded))


async def _docs(_: Runtime, exchange: Exchange) -> None:
    text = await asyncio.to_thread(page.reference)
    await exchange.answer(_with_address(exchange, text), headers=_HTML)


async def _page(_: Runtime, exchange: Exchange) -> None:
    text = await asyncio.to_thread(rendered, exchange.scope["path_params"]["name"])
    await exchange.answer(text.encode("utf-8"), headers=_HTML)


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def _with_address(exchange: Exchange, text: str) -> bytes:
    """`limits.py` lets loopback names in alone; what else a header may hold has no business in a page."""
    host = exchange.header(b"host")
    shown = host if _HOST.fullmatch(host) else "localhost"
    return text.replace(page.BASE_URL, f"{exchange.scope['scheme']}://{shown}").encode("utf-8")
