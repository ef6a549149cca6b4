"""The routes of responses: create, read, delete.

One `KeptResponses` per daemon, made with its routes.

Does not: hold any logic of a response (`create.py`).
"""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from localrun.server.http.exchange import Exchange, route
from localrun.server.openai.chunks import encode
from localrun.server.openai.responses.create import create
from localrun.server.openai.responses.kept import KeptResponses
from localrun.server.runtime import Runtime


def routes(runtime: Runtime) -> list[Route]:
    """All routes of responses."""
    kept = KeptResponses()
    return [
        route("/v1/responses", runtime, partial(create, kept), methods=["POST"]),
        route("/v1/responses/{id}", runtime, partial(_read, kept), methods=["GET"]),
        route("/v1/responses/{id}", runtime, partial(_delete, kept), methods=["DELETE"]),
        route("/v1/responses/{id}/input_items", runtime, partial(_input_items, kept), methods=["GET"]),
    ]


async def _read(kept: KeptResponses, _: Runtime, exchange: Exchange) -> None:
    await exchange.answer(encode(kept.get(_id(exchange)).response))


async def _delete(kept: KeptResponses, _: Runtime, exchange: Exchange) -> None:
    response_id = _id(exchange)
    kept.delete(response_id)
    await exchange.answer(encode({"id": response_id, "object": "response", "deleted": True}))


async def _input_items(kept: KeptResponses, _: Runtime, exchange: Exchange) -> None:
    """The newest first, as OpenAI lists them; all of them."""
    items = list(reversed(kept.get(_id(exchange)).input))
    ids = [item.get("id") for item in items]
    listed = {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
    await exchange.answer(encode(listed))


def _id(exchange: Exchange) -> str:
    name = exchange.scope["path_params"]["id"]
    assert isinstance(name, str)
    return name
