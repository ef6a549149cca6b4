"""OpenAI's API: `/v1/*`, and beside it llama-server's `/infill`; and its lists of models.

Models are told of from file headers, nothing is loaded. The other routes' logic is in modules of their own.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from starlette.routing import Route

from localrun.models.storage.store import Model
from localrun.server.http.exchange import Exchange, route
from localrun.server.openai.chat import chat
from localrun.server.openai.completions import complete
from localrun.server.openai.fim import complete_fim, complete_infill
from localrun.server.openai.responses import create
from localrun.server.runtime import Runtime


class OpenAIModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model's file, as llama-server has it."""

    n_ctx_train: int
    n_params: int
    n_vocab: int
    size: int


class OpenAIModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is here."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: OpenAIModelMeta


class OpenAIModels(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are here."""

    object: Literal["list"]
    data: list[OpenAIModel]


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        route("/v1/models", runtime, list_models, methods=["GET"]),
        route("/v1/models/{id:path}", runtime, one_model, methods=["GET"]),
        route("/v1/chat/completions", runtime, chat, methods=["POST"]),
        route("/v1/completions", runtime, complete, methods=["POST"]),
        route("/v1/fim/completions", runtime, complete_fim, methods=["POST"]),
        route("/infill", runtime, complete_infill, methods=["POST"]),
        *create.response_routes(runtime),
    ]


async def list_models(runtime: Runtime, exchange: Exchange) -> None:
    """GET /v1/models."""
    models = await asyncio.to_thread(runtime.store.list)
    rows = [_row(model, model.name) for model in models]
    await exchange.answer_json(OpenAIModels(object="list", data=rows))


async def one_model(runtime: Runtime, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    name: str = exchange.scope["path_params"]["id"]
    model = await asyncio.to_thread(runtime.store.resolve, name)
    await exchange.answer_json(_row(model, name))


def _row(model: Model, name: str) -> OpenAIModel:
    header = model.header
    return OpenAIModel(
        id=name,
        object="model",
        created=int(model.modified_at.timestamp()),
        owned_by="localrun",
        meta=OpenAIModelMeta(
            n_ctx_train=header.n_ctx_train, n_params=header.n_params, n_vocab=header.n_vocab, size=model.size_bytes
        ),
    )
