"""The lists of models, and llama-server's `/lora-adapters`. Both tell of file headers, and load nothing.

The list of adapters has every one that has a name, for whatever model. An `id` is a place in it, in the order in which
they came, so it stays as long as no older one goes; names and digests stay as they are. `?model=NAME` leaves those that
fit one model, under the same ids. llama-server's POST sets scales that count for all who say nothing. Here nothing that
one client asks for changes the answers of the others, so it is refused, with what to do instead.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localrun.errors import BadModelFile, Conflict, NotSupported
from localrun.models.gguf.header import Header
from localrun.models.storage.model import NamedAdapter
from localrun.models.storage.store import Store
from localrun.server.http.access import Caller
from localrun.server.http.exchange import Exchange, parameter
from localrun.server.llama_server.models import (
    LlamaArchitecture,
    LlamaModel,
    LlamaModelStatus,
    Statuses,
    architecture_of,
    llama_model,
    status_of,
    statuses,
)
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


async def list_models(runtime: Runtime, exchange: Exchange) -> None:
    data = await asyncio.to_thread(_rows, runtime, exchange.caller)
    # Loaded ones first: clients of llama-server look at the first alone.
    also = [
        llama_model(row.id, row.meta.capabilities) for row in sorted(data, key=lambda row: row.status.value != "loaded")
    ]
    await exchange.answer_redacted(OpenAIModels(object="list", data=data, models=also))


async def one_model(runtime: Runtime, exchange: Exchange) -> None:
    name: str = exchange.scope["path_params"]["id"]
    target = await asyncio.to_thread(runtime.targets.find, exchange.caller, name)
    await exchange.answer_redacted(await asyncio.to_thread(_row, target, statuses(runtime)))


def _rows(runtime: Runtime, caller: Caller) -> list[OpenAIModel]:
    """In a thread."""
    found = statuses(runtime)
    return [_row(target, found) for target in runtime.targets.visible(caller)]


def _row(target: Target, found: Statuses) -> OpenAIModel:
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


class AdapterRow(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter. `scale` is 0: none is in effect unless it is asked for. The first five are llama-server's fields."""

    id: int
    path: str
    scale: float
    task_name: str
    prompt_prefix: str
    name: str
    digest: str
    kind: str
    architecture: str


async def list_adapters(runtime: Runtime, exchange: Exchange) -> None:
    """GET /lora-adapters."""
    caller, model = exchange.caller, parameter(exchange, "model")
    header = (await runtime.targets.one(caller, model)).header if model else None
    rows = await asyncio.to_thread(_adapter_rows, runtime.store, header)
    rows = [row for row in rows if caller.may_use_model(row.name)]
    if not caller.is_admin:  # where files lie is nobody else's business
        rows = [msgspec.structs.replace(row, path=row.name) for row in rows]
    await exchange.answer_redacted(rows)


async def change_adapters(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise NotSupported(
        "scales for all requests are not supported, for they would change other clients' answers; say them in the "
        "request, as lora or in the model's name (model+adapter=0.5), or create a model with the adapter (ADAPTER in a "
        "Modelfile) and have clients name that"
    )


def _adapter_rows(store: Store, header: Header | None) -> list[AdapterRow]:
    """In a thread: hashes files whose digest is not known, once."""
    rows = []
    for place, adapter in enumerate(store.adapters()):
        if header is None or not adapter.misfit(header):
            with suppress(BadModelFile, Conflict):  # gone, or written to, since it was listed
                rows.append(_adapter_row(place, adapter))
    return rows


def _adapter_row(place: int, adapter: NamedAdapter) -> AdapterRow:
    return AdapterRow(
        id=place,
        path=str(adapter.path),
        scale=0.0,
        task_name=_said(adapter, "adapter.lora.task_name"),
        prompt_prefix=_said(adapter, "adapter.lora.prompt_prefix"),
        name=adapter.name,
        digest=f"sha256:{adapter.sha256}",
        kind=adapter.facts.kind,
        architecture=adapter.facts.architecture,
    )


def _said(adapter: NamedAdapter, key: str) -> str:
    value = adapter.header.metadata.get(key)
    return value if isinstance(value, str) else ""
