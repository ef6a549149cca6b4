"""Ollama's API: `/` and `/api/*`.

Embeddings are in `localrun.server.embedding`. What is not supported at all is a route that says so (`/api/push`): a
client takes a 404 for a missing model.

Does not: hold any logic; each route's module does.
"""

from __future__ import annotations

from starlette.routing import Route

from localrun import __version__
from localrun.server.http.exchange import Exchange, route
from localrun.server.ollama import account, changes
from localrun.server.ollama import models as ollama_models
from localrun.server.ollama.blobs import blob
from localrun.server.ollama.chat import chat
from localrun.server.ollama.create import create
from localrun.server.ollama.generate import generate
from localrun.server.ollama.level import OLLAMA_API_LEVEL
from localrun.server.ollama.pull import pull
from localrun.server.ollama.show import show
from localrun.server.runtime import Runtime


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        route("/", runtime, _root, methods=["GET"]),
        route("/api/version", runtime, _version, methods=["GET"]),
        route("/api/tags", runtime, ollama_models.tags, methods=["GET"]),
        route("/api/ps", runtime, ollama_models.ps, methods=["GET"]),
        route("/api/show", runtime, show, methods=["POST"]),
        route("/api/generate", runtime, generate, methods=["POST"]),
        route("/api/chat", runtime, chat, methods=["POST"]),
        route("/api/pull", runtime, pull, methods=["POST"]),
        route("/api/create", runtime, create, methods=["POST"]),
        route("/api/copy", runtime, changes.copy, methods=["POST"]),
        route("/api/delete", runtime, changes.delete, methods=["DELETE"]),
        route("/api/push", runtime, changes.push, methods=["POST"]),
        route("/api/blobs/{digest}", runtime, blob, methods=["HEAD", "POST"]),
        route("/api/status", runtime, account.status, methods=["GET"]),
        route("/api/me", runtime, account.me, methods=["POST"]),
        route("/api/signout", runtime, account.sign_out, methods=["POST"]),
        route("/api/experimental/{name}", runtime, account.experimental, methods=["GET", "POST"]),
    ]


async def _root(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer(b"Ollama is running", headers=[(b"content-type", b"text/plain; charset=utf-8")])


async def _version(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json({"version": OLLAMA_API_LEVEL, "localrun": __version__})
