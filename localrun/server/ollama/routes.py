"""Ollama's API: `/` and `/api/*`.

Routes that Ollama has and this build does not are there too, and say so: a client that gets 404 for `/api/embed` tells
its user that the model is missing.

Does not: hold any logic; each route's module does.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.routing import Route

from localrun import __version__
from localrun.errors import ModelNotFound, NotSupported
from localrun.server.http import bodies
from localrun.server.http.endpoint import Handler, route
from localrun.server.http.exchange import Exchange
from localrun.server.ollama import models as ollama_models
from localrun.server.ollama.bodies import ModelBody
from localrun.server.ollama.chat import chat
from localrun.server.ollama.generate import generate
from localrun.server.runtime import Runtime

# The release of Ollama whose API this one follows. Clients parse it as three bare numbers and compare it with the
# release that brought a feature they use.
OLLAMA_API_LEVEL = "0.33.0"

_NOT_YET = {
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/api/create": "creating models",
    "/api/copy": "copying models",
    "/api/delete": "deleting models",
    "/api/push": "uploading models",
    "/api/blobs/{digest}": "uploading model files",
}


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        route("/", runtime, _root, methods=["GET"]),
        route("/api/version", runtime, _version, methods=["GET"]),
        route("/api/tags", runtime, ollama_models.tags, methods=["GET"]),
        route("/api/ps", runtime, ollama_models.ps, methods=["GET"]),
        route("/api/show", runtime, ollama_models.show, methods=["POST"]),
        route("/api/generate", runtime, generate, methods=["POST"]),
        route("/api/chat", runtime, chat, methods=["POST"]),
        route("/api/pull", runtime, _pull, methods=["POST"]),
        *(route(path, runtime, _not_yet(what), methods=["GET", "POST", "DELETE"]) for path, what in _NOT_YET.items()),
    ]


async def _root(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer(b"Ollama is running", headers=[(b"content-type", b"text/plain; charset=utf-8")])


async def _version(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer(msgspec.json.encode({"version": OLLAMA_API_LEVEL, "localrun": __version__}))


async def _pull(runtime: Runtime, exchange: Exchange) -> None:
    """A model that is here is pulled already; clients pull before they use one."""
    body = bodies.decode(await exchange.read_body(), ModelBody)
    name = body.model_name
    try:
        await asyncio.to_thread(runtime.store.resolve, name)
    except ModelNotFound:
        raise NotSupported(
            f"model '{name[:80]}' is not here, and this build does not download models yet; put a GGUF file into the "
            f"models folder, or use the path of one as the model's name"
        ) from None
    line = b'{"status":"success"}\n'
    if body.stream is False:
        await exchange.answer(line)
    else:
        await exchange.open_stream()
        await exchange.close_stream(line)


def _not_yet(what: str) -> Handler:
    async def refuse(_: Runtime, exchange: Exchange) -> None:
        raise NotSupported(f"{exchange.path}: this build does not support {what} yet")

    return refuse
