"""The lists of models, loading and unloading one as llama-server has it, and its `/lora-adapters`. The lists tell of
file headers, and load nothing.

The list of adapters has every one that has a name, for whatever model. An `id` is a place in it, in the order in which
they came, so it stays as long as no older one goes; names and digests stay as they are. `?model=NAME` leaves those that
fit one model, under the same ids. llama-server's POST sets scales that count for all who say nothing. Here nothing that
one client asks for changes the answers of the others, so it is refused, with what to do instead.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localrun.errors import BadModelFile, BadRequest, Conflict, NotSupported
from localrun.models.gguf.header import Header
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store
from localrun.server.engines.resident import ResidentState, Use, use_of
from localrun.server.http.access import Caller
from localrun.server.http.exchange import Exchange, parameter
from localrun.server.http.fields import ServiceFields, job_request_of
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime
from localrun.server.targets import Target

Status = Literal["loaded", "loading", "unloaded"]
# Of files that are in memory here, or on their way, and of models that are elsewhere, by their names.
Statuses = dict[Path | str, Status]


class LlamaModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model is in memory; it is loaded by the next request as well."""

    value: Status


class LlamaArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """What the model takes and gives: text, image, audio."""

    input_modalities: list[str]
    output_modalities: list[str]


class LlamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as llama-server lists it beside `data`. One that sees or hears is `multimodal`."""

    name: str
    model: str
    capabilities: list[str]


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """POST /models/load and /models/unload."""

    model: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """It is done."""

    success: Literal[True]


def statuses(runtime: Runtime) -> Statuses:
    found: Statuses = {row.model: "loaded" for row in runtime.rows_elsewhere() if row.state == "ready"}
    for resident in runtime.supervisor.residents():
        if resident.state is ResidentState.READY:
            found[resident.key] = "loaded"
        elif resident.state is ResidentState.LOADING:
            found.setdefault(resident.key, "loading")
    return found


def status_of(model: Model, found: Statuses) -> LlamaModelStatus:
    """In a thread: asks the disk where anything is loaded."""
    if not found:
        return LlamaModelStatus(value="unloaded")
    return LlamaModelStatus(value=found.get(model.name) or found.get(model.path.resolve(), "unloaded"))


def architecture_of(model: Model) -> LlamaArchitecture:
    """By its projector."""
    known = capabilities(model)
    media = [name for capability, name in (("vision", "image"), ("audio", "audio")) if capability in known]
    return LlamaArchitecture(input_modalities=["text", *media], output_modalities=["text"])


def llama_model(name: str, known: tuple[str, ...]) -> LlamaModel:
    """One of `models`; `known` are its capabilities."""
    senses = not {"vision", "audio"}.isdisjoint(known)
    found = [each for each in ("completion", "embedding", "rerank") if each in known]
    return LlamaModel(name=name, model=name, capabilities=[*found, *(["multimodal"] if senses else [])])


class OpenAIModelMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model's file, as llama-server has it; `capabilities` as in `/api/tags`. `n_ctx` is that of a loaded
    model."""

    n_ctx: int | UnsetType = UNSET
    n_ctx_train: int
    n_params: int
    n_vocab: int
    size: int
    capabilities: tuple[str, ...]


class OpenAIModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is here; with `parent` a model with an adapter that fits it, as vLLM lists them; with `tier` a name
    that stands for two models, whose large one the rest is of. `status` and `architecture` are as in llama-server. How
    long a request to a loaded model may be, agents look up by one of three names: llama-server's (`meta.n_ctx`), vLLM's
    and OpenRouter's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: OpenAIModelMeta
    status: LlamaModelStatus
    architecture: LlamaArchitecture
    max_model_len: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    tier: dict[str, Any] | UnsetType = UNSET


class OpenAIModels(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are here; llama-server's clients look into `models`."""

    object: Literal["list"]
    data: list[OpenAIModel]
    models: list[LlamaModel]


async def list_models(runtime: Runtime, exchange: Exchange) -> None:
    data = await asyncio.to_thread(_rows, runtime, exchange.caller, runtime.contexts())
    # Loaded ones first: clients of llama-server look at the first alone.
    also = [
        llama_model(row.id, row.meta.capabilities) for row in sorted(data, key=lambda row: row.status.value != "loaded")
    ]
    await exchange.answer_redacted(OpenAIModels(object="list", data=data, models=also))


async def one_model(runtime: Runtime, exchange: Exchange) -> None:
    target = await asyncio.to_thread(runtime.targets.find, exchange.caller, exchange.path_id)
    await exchange.answer_redacted(await asyncio.to_thread(_row, target, statuses(runtime), runtime.contexts()))


def _rows(runtime: Runtime, caller: Caller, contexts: dict[str, int]) -> list[OpenAIModel]:
    found = statuses(runtime)
    return [_row(target, found, contexts) for target in runtime.targets.visible(caller)]


def _row(target: Target, found: Statuses, contexts: dict[str, int]) -> OpenAIModel:
    """In a thread: reads the file."""
    model, header = target.model, target.model.header
    n_ctx = contexts.get(model.name, UNSET)
    return OpenAIModel(
        id=target.name,
        object="model",
        created=int(model.modified_at.timestamp()),
        owned_by="localrun",
        meta=OpenAIModelMeta(
            n_ctx=n_ctx,
            n_ctx_train=header.n_ctx_train,
            n_params=header.n_params,
            n_vocab=header.n_vocab,
            size=model.size_bytes,
            capabilities=capabilities(model),
        ),
        status=status_of(model, found),
        architecture=architecture_of(model),
        max_model_len=n_ctx,
        context_length=n_ctx,
        parent=target.parent or UNSET,
        tier=UNSET if target.tier is None else target.tier.rules,
    )


async def load(runtime: Runtime, exchange: Exchange) -> None:
    """Answers when the model is there; raises what loading it raises."""
    name = (await exchange.read_json(NamedModel)).model
    runtime.targets.check_one(exchange.caller, name)
    model = await asyncio.to_thread(runtime.targets.here, name)
    use = Use.TEXT if model is None else use_of(model.header)
    async with exchange.while_connected(), runtime.job(job_request_of(exchange, name, ServiceFields(), use=use)):
        pass
    await exchange.answer_json(Done(success=True))


async def unload(runtime: Runtime, exchange: Exchange) -> None:
    """Answers when an idle model is gone; one in use goes when its requests have ended. Raises
    BadRequest for one that is not loaded."""
    name = (await exchange.read_json(NamedModel)).model
    runtime.targets.check_one(exchange.caller, name)
    exchange.caller.check_change(f"unload {name}")
    if not await runtime.unload(name):
        raise BadRequest.of("model", f"'{name}' is not loaded, so there is nothing to unload")
    await exchange.answer_json(Done(success=True))


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
                rows.append(
                    AdapterRow(
                        id=place,
                        path=str(adapter.path),
                        scale=0.0,
                        task_name=adapter.header.text("adapter.lora.task_name"),
                        prompt_prefix=adapter.header.text("adapter.lora.prompt_prefix"),
                        name=adapter.name,
                        digest=f"sha256:{adapter.sha256}",
                        kind=adapter.facts.kind,
                        architecture=adapter.facts.architecture,
                    )
                )
    return rows
