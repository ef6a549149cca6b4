"""Ollama's API: `/` and `/api/*`.

Embeddings are in `localrun.server.embedding`. What is not supported at all is a route that says so (`/api/push`): a
client takes a 404 for a missing model.

Does not: hold any logic; each route's module does.
"""

from __future__ import annotations

import msgspec

from localrun import __version__
from localrun.errors import NotSupported, Unauthorized
from localrun.server import web
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.ollama.create import OLLAMA_API_LEVEL
from localrun.server.runtime import Runtime


class OllamaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the level of Ollama's API that clients may count on; `localrun` the daemon's own version."""

    version: str
    localrun: str


class CloudStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether models run elsewhere: never."""

    disabled: bool
    source: str


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What of Ollama's own services there is: nothing."""

    cloud: CloudStatus


async def root(_: Runtime, exchange: Exchange) -> None:
    """By this text Ollama's clients know a server; a browser gets the chat page."""
    if web.wants_html(exchange.header(b"accept")):
        await web.send_page(exchange)
        return
    plain: Headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"vary", b"accept")]
    await exchange.answer(b"Ollama is running", headers=plain)


async def version(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(OllamaVersion(version=OLLAMA_API_LEVEL, localrun=__version__))


async def status(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(ServiceStatus(cloud=CloudStatus(disabled=True, source="config")))


async def me(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise Unauthorized("nobody is signed in; localrun has no accounts and needs none")


async def sign_out(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.answer(b"")


async def experimental(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise NotSupported(f"{exchange.path} is a service of ollama.com, which localrun does not use")
