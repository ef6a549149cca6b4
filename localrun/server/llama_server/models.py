"""What llama-server says of its models in `/models`, and POST /models/load and /models/unload.

`/models` is OpenAI's list (`openai/models.py`); this is what llama-server's clients look for in it besides.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import msgspec

from localrun.errors import BadRequest
from localrun.models.gguf.header import RANK
from localrun.models.storage.model import Model
from localrun.server.engines.resident import ResidentState, Use
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import ServiceFields, job_request_of
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime

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


async def load(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler. Answers when the model is there; raises what loading it raises."""
    name = (await exchange.read_json(NamedModel)).model
    runtime.targets.check_one(exchange.caller, name)
    model = await asyncio.to_thread(runtime.targets.here, name)
    use = Use.EMBED if model is not None and not model.header.generates else Use.TEXT
    if model is not None and model.header.pooling == RANK:
        use = Use.RERANK
    async with exchange.while_connected(), runtime.job(job_request_of(exchange, name, ServiceFields(), use=use)):
        pass
    await exchange.answer_json(Done(success=True))


async def unload(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler. Answers when an idle model is gone; one in use goes when its requests have ended. Raises
    BadRequest for one that is not loaded."""
    name = (await exchange.read_json(NamedModel)).model
    runtime.targets.check_one(exchange.caller, name)
    exchange.caller.check_change(f"unload {name}")
    if not await runtime.unload(name):
        raise BadRequest(f"model: '{name}' is not loaded, so there is nothing to unload", field="model")
    await exchange.answer_json(Done(success=True))
