"""OpenAI's API: `/v1/*`, and beside it llama-server's `/lora-adapters`; and its lists of models.

Models are told of from file headers, nothing is loaded. The other routes' logic is in modules of their own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.routing import Route

from localrun.server.http.access import Visitor
from localrun.server.http.exchange import Exchange, route
from localrun.server.llama_server.models import (
    LlamaArchitecture,
    LlamaModel,
    LlamaModelStatus,
    Status,
    architecture_of,
    llama_model,
    status_of,
    statuses,
)
from localrun.server.openai.chat import chat, count_tokens
from localrun.server.openai.completions import complete
from localrun.server.openai.fim import complete_fim
from localrun.server.openai.lora import change_adapters, list_adapters
from localrun.server.openai.responses import create
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime
from localrun.server.targets import Target


class OpenAIModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model's file, as llama-server has it; `capabilities` as in `/api/tags`."""

    n_ctx_train: int
    n_params: int
    n_vocab: int
    size: int
    capabilities: tuple[str, ...]


class OpenAIModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is here; with `parent` a model with an adapter that fits it, as vLLM lists them; with `tier` a name
    that stands for two models, whose large one the rest is of. `status` and `architecture` are as in llama-server."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: OpenAIModelMeta
    status: LlamaModelStatus
    architecture: LlamaArchitecture
    parent: str | UnsetType = UNSET
    tier: dict[str, Any] | UnsetType = UNSET


class OpenAIModels(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are here; llama-server's clients look into `models`."""

    object: Literal["list"]
    data: list[OpenAIModel]
    models: list[LlamaModel]


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        *(route(path, runtime, list_models, methods=["GET"]) for path in ("/v1/models", "/models")),
        route("/v1/models/{id:path}", runtime, one_model, methods=["GET"]),
        route("/v1/chat/completions", runtime, chat, methods=["POST"]),
        route("/v1/chat/completions/input_tokens", runtime, count_tokens, methods=["POST"]),
        route("/v1/completions", runtime, complete, methods=["POST"]),
        route("/v1/fim/completions", runtime, complete_fim, methods=["POST"]),
        route("/lora-adapters", runtime, list_adapters, methods=["GET"]),
        route("/lora-adapters", runtime, change_adapters, methods=["POST"]),
        *create.response_routes(runtime),
    ]


async def list_models(runtime: Runtime, exchange: Exchange) -> None:
    """GET /v1/models."""
    data = await asyncio.to_thread(_rows, runtime, exchange.visitor)
    # Loaded ones first: clients of llama-server look at the first alone.
    also = [
        llama_model(row.id, row.meta.capabilities) for row in sorted(data, key=lambda row: row.status.value != "loaded")
    ]
    await exchange.answer_facts(OpenAIModels(object="list", data=data, models=also))


async def one_model(runtime: Runtime, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    name: str = exchange.scope["path_params"]["id"]
    target = await asyncio.to_thread(runtime.targets.find, exchange.visitor, name)
    await exchange.answer_facts(await asyncio.to_thread(_row, target, statuses(runtime)))


def _rows(runtime: Runtime, visitor: Visitor) -> list[OpenAIModel]:
    """In a thread."""
    found = statuses(runtime)
    return [_row(target, found) for target in runtime.targets.visible(visitor)]


def _row(target: Target, found: dict[Path, Status]) -> OpenAIModel:
    """In a thread: reads the file."""
    model, header = target.model, target.model.header
    return OpenAIModel(
        id=target.name,
        object="model",
        created=int(model.modified_at.timestamp()),
        owned_by="localrun",
        meta=OpenAIModelMeta(
            n_ctx_train=header.n_ctx_train,
            n_params=header.n_params,
            n_vocab=header.n_vocab,
            size=model.size_bytes,
            capabilities=capabilities(model),
        ),
        status=status_of(model, found),
        architecture=architecture_of(model),
        parent=target.parent or UNSET,
        tier=UNSET if target.tier is None else target.tier.rules,
    )
