"""`/openapi.json`, `/docs` and `/docs/{name}`, and with them all routes: what the app serves, and which is a request's.

Runs in the daemon's event loop; the document is made once, in a thread, when it is first asked for.
Does not: describe anything; `operations.py`, `document.py` and `page.py` do.
"""

from __future__ import annotations

import asyncio
import re
from functools import cache, lru_cache
from typing import Any

import msgspec
from starlette.routing import Route, compile_path

from localrun.server.http.access import Right
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.http.operation import Operation, path_parameter
from localrun.server.openapi import page
from localrun.server.openapi.document import Json, document_of
from localrun.server.openapi.operations import SERVED
from localrun.server.openapi.page import CONTENT_POLICY, rendered
from localrun.server.runtime import Runtime

_HTML: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", CONTENT_POLICY),
    (b"referrer-policy", b"no-referrer"),
]
_HOST = re.compile(r"[0-9A-Za-z.:\[\]-]{1,100}", re.ASCII)


async def _openapi(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer(await asyncio.to_thread(_encoded))


async def _docs(_: Runtime, exchange: Exchange) -> None:
    text = await asyncio.to_thread(reference)
    await exchange.answer(_with_address(exchange, text), headers=_HTML)


async def _page(_: Runtime, exchange: Exchange) -> None:
    text = await asyncio.to_thread(rendered, exchange.scope["path_params"]["name"])
    await exchange.answer(text.encode("utf-8"), headers=_HTML)


@cache
def document() -> Json:
    """Of all routes. Not to be changed."""
    return document_of(OPERATIONS)


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


@cache
def reference() -> str:
    return page.reference(document())


def _with_address(exchange: Exchange, text: str) -> bytes:
    """`limits.py` lets loopback names in alone; what else a header may hold has no business in a page."""
    host = exchange.header(b"host")
    shown = host if _HOST.fullmatch(host) else "localhost"
    return text.replace(page.BASE_URL, f"{exchange.scope['scheme']}://{shown}").encode("utf-8")


OPERATIONS: tuple[Operation, ...] = (
    *SERVED,
    Operation("GET", "/openapi.json", _openapi, Right.USE, "This document", answer=dict[str, Any]),
    Operation("GET", "/docs", _docs, Right.USE, "This document for people", answer=str,
        answer_content_type="text/html"),
    Operation("GET", "/docs/{name}", _page, Right.USE, "A page of the documentation", answer=str,
        answer_content_type="text/html", parameters=(path_parameter("name", "As `/docs` lists them"),), errors=(404,)),
)  # fmt: skip
_ALWAYS = {(one.method, one.path): one for one in OPERATIONS if "{" not in one.path}
_OTHERS = [(one, compile_path(one.pattern)[0]) for one in OPERATIONS if "{" in one.path]


def routes(runtime: Runtime) -> list[Route]:
    """All, those first that wait for a model: the router looks at one after the other."""
    return [one.route(runtime) for one in sorted(OPERATIONS, key=lambda one: not one.serves)]


@lru_cache(256)
def find(method: str, path: str) -> Operation | None:
    """The operation that a request asks for, which may be GET's for HEAD; None where no route answers."""
    found = _ALWAYS.get((method, path))
    if found is None:
        found = next((one for one, pattern in _OTHERS if one.method == method and pattern.match(path)), None)
    return find("GET", path) if found is None and method == "HEAD" else found
