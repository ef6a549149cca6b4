"""GET /props and /slots: what is loaded and what it does, as llama-server tells of its one model.

`?model=` chooses. Without it the model that is loaded is told of; with none or several loaded, `/props` tells of the
daemon, as a llama-server that routes to several does, and `/slots` lists the slots of all of them. Nothing is loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from localrun.config import in_short
from localrun.errors import BadModelFile, BadRequest, ModelNotFound, NotSupported, Unavailable
from localrun.models.gguf.header import special_token_text
from localrun.models.name import split_adapters
from localrun.models.storage.model import Model
from localrun.server.embedding import MEDIA_PLACE
from localrun.server.engines.machine import build_name
from localrun.server.engines.resident import Use
from localrun.server.http.access import Caller
from localrun.server.http.exchange import Exchange, parameter
from localrun.server.http.fields import defaults_of, sampling, stop_strings
from localrun.server.jobs.generation import Generation
from localrun.server.llama_server.completion import generation_settings, with_defaults
from localrun.server.media.decoder import kinds_of
from localrun.server.runtime import Runtime
from localrun.snapshot import EngineRow, RequestState
from localrun.wire import MediaKind, Sampling, Submit


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What counts where a request says nothing. `n_ctx` is the most tokens that one may have."""

    params: dict[str, Any] | None
    n_ctx: int


class Modalities(msgspec.Struct, frozen=True, kw_only=True):
    """What the model takes besides text."""

    vision: bool
    audio: bool
    video: bool = False


class LlamaProps(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or with the `role` router the daemon, which loads `max_instances` models at once (0: as many as fit).
    `media_marker` stands for a picture in a `prompt_string`. What sleeps is not loaded; the next request loads it."""

    default_generation_settings: GenerationDefaults
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    media_marker: str | UnsetType = UNSET
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = True
    chat_template: str | UnsetType = UNSET
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    model_ftype: str | UnsetType = UNSET
    build_info: str = build_name()
    is_sleeping: bool = False
    role: str | UnsetType = UNSET
    max_instances: int | UnsetType = UNSET
    models_autoload: bool | UnsetType = UNSET


class NextToken(msgspec.Struct, frozen=True, kw_only=True):
    """How far the answer is; `n_remain` -1 is without a limit."""

    has_next_token: bool
    has_new_line: bool
    n_remain: int
    n_decoded: int


class LlamaSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot, and the request that is or was the last one in it. `id_task` counts requests, `request` is its id in
    `/localrun/v1/requests`, and `params` is how it is sampled."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    model: str
    id_task: int | UnsetType = UNSET
    request: str | UnsetType = UNSET
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    params: dict[str, Any] | UnsetType = UNSET
    next_token: list[NextToken] | UnsetType = UNSET


async def show_props(runtime: Runtime, exchange: Exchange) -> None:
    name = parameter(exchange, "model")
    loaded = _generating(runtime, exchange.caller)
    if not name and len({engine.row.model for engine in loaded}) == 1:
        name = loaded[0].row.model
    if not name:
        await exchange.answer_redacted(_of_daemon(runtime, is_sleeping=not loaded))
        return
    model = await runtime.targets.one(exchange.caller, name)
    found = await asyncio.to_thread(_of_model, runtime, name, model, await _with_its_files(runtime, name, loaded))
    if not exchange.caller.is_admin:  # where files lie is nobody else's business
        found = msgspec.structs.replace(found, model_path=found.model_alias)
    await exchange.answer_redacted(found)


async def list_slots(runtime: Runtime, exchange: Exchange) -> None:
    """Raises Unavailable with `fail_on_no_slot` where none is free."""
    name, caller = parameter(exchange, "model"), exchange.caller
    engines = _generating(runtime, caller)
    if name:
        engines = await _with_its_files(runtime, name, engines)
    slots = [slot for engine in engines for slot in _slots_of(engine, caller, runtime)]
    if parameter(exchange, "fail_on_no_slot") and all(slot.is_processing for slot in slots):
        raise Unavailable("no slot is free; try again later")
    await exchange.answer_redacted(slots)


async def keep_slot(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise NotSupported(
        "slots are not saved, restored or erased by hand: prefixes are kept and found by themselves, and DELETE "
        "/localrun/v1/cache forgets them"
    )


class _Engine(NamedTuple):
    """One that generates, and the requests that are or were the last ones in its slots, as far as this daemon knows."""

    row: EngineRow
    last_in_slot: Mapping[int, Generation]


def _generating(runtime: Runtime, caller: Caller) -> list[_Engine]:
    """The loaded engines that generate, of models that whoever asks may use."""
    target_itl_s = runtime.settings.target_itl_s
    found = [_Engine(one.row(target_itl_s), one.link.last_in_slot) for one in runtime.supervisor.residents()]
    if (view := runtime.view) is not None:
        links = ((row, view.link_of(row)) for row in view.rows())
        found += [_Engine(row, {} if link is None else link.last_in_slot) for row, link in links]
    rows = [(one, one.row) for one in found]
    return [one for one, row in rows if (row.state, row.use) == ("ready", Use.TEXT) and caller.may_use_model(row.model)]


async def _with_its_files(runtime: Runtime, name: str, loaded: list[_Engine]) -> list[_Engine]:
    """Those that answer requests by this name, whatever they were loaded as."""
    pids = set[int | None]()
    with suppress(ModelNotFound, BadModelFile):
        pids = {one.link.pid for one in await runtime.supervisor.residents_of(name)}
    named = in_short(split_adapters(name).model)
    return [one for one in loaded if (in_short(one.row.model) == named if one.row.replica else one.row.pid in pids)]


def _of_daemon(runtime: Runtime, *, is_sleeping: bool) -> LlamaProps:
    return LlamaProps(
        is_sleeping=is_sleeping,
        role="router",
        max_instances=runtime.settings.max_models,
        models_autoload=True,
        default_generation_settings=GenerationDefaults(params=None, n_ctx=0),
        total_slots=runtime.settings.slots,
        model_alias="localrun",
        model_path="none",
        modalities=Modalities(vision=False, audio=False),
    )


def _of_model(runtime: Runtime, name: str, model: Model, loaded: list[_Engine]) -> LlamaProps:
    """In a thread: reads the store. `loaded` have its files."""
    header = model.header
    if not header.generates:
        raise BadRequest.of("model", f"'{name}' generates no text")
    kinds = kinds_of(model)
    defaults = defaults_of(model)
    n_ctx = runtime.supervisor.loads.asked(model).num_ctx or header.n_ctx_train
    said = Submit(
        id=0,
        sampling=sampling((with_defaults(defaults),), Sampling()),
        n_predict=defaults.n_predict(None),
        stop=stop_strings(defaults.stop),
    )
    params = generation_settings(said)
    return LlamaProps(
        default_generation_settings=GenerationDefaults(params=params, n_ctx=loaded[0].row.n_ctx if loaded else n_ctx),
        is_sleeping=not loaded,
        total_slots=sum(one.row.slots for one in loaded) if loaded else runtime.settings.slots,
        model_alias=model.name,
        model_path=str(model.path),
        model_ftype=header.quantization,
        modalities=Modalities(vision=MediaKind.IMAGE in kinds, audio=MediaKind.AUDIO in kinds),
        media_marker=MEDIA_PLACE,
        chat_template=model.template or model.guessed_template,
        bos_token=special_token_text(header, "tokenizer.ggml.bos_token_id"),
        eos_token=special_token_text(header, "tokenizer.ggml.eos_token_id"),
    )


def _slots_of(engine: _Engine, caller: Caller, runtime: Runtime) -> list[LlamaSlot]:
    row, speculates = engine.row, runtime.settings.speculation == "on"
    known = {place: record for place, record in engine.last_in_slot.items() if place < row.slots}
    busy = {place for place, record in known.items() if record.slot == place}
    if row.replica:  # requests of other doors are somewhere
        busy.update([place for place in range(row.slots) if place not in busy][: max(0, row.slots_busy - len(busy))])
    slots = []
    for place in range(row.slots):
        slot = LlamaSlot(
            id=place, n_ctx=row.n_ctx, speculative=speculates, is_processing=place in busy, model=row.model
        )
        record = known.get(place)
        # What others ask is nobody's business.
        is_shown = record is not None and caller.can_see(record.key) and (record.slot == place or place not in busy)
        slots.append(_with_request(slot, record) if record is not None and is_shown else slot)
    return slots


# What a client may have written itself, and llama-server does not show here either.
_ITS_OWN_TEXTS = ("stop", "grammar", "logit_bias", "dry_sequence_breakers")


def _with_request(slot: LlamaSlot, record: Generation) -> LlamaSlot:
    row, asked = record.row(time.monotonic()), record.asked
    n_cached, n_predict = row.cached_tokens or 0, -1 if asked is None else asked.n_predict
    params = {} if asked is None else generation_settings(asked)
    return msgspec.structs.replace(
        slot,
        id_task=record.number,
        request=record.id,
        n_prompt_tokens=row.prompt_tokens or 0,
        n_prompt_tokens_processed=max(row.computed_tokens - n_cached, 0),
        n_prompt_tokens_cache=n_cached,
        params={name: value for name, value in params.items() if name not in _ITS_OWN_TEXTS},
        next_token=[
            NextToken(
                has_next_token=row.state is RequestState.DECODE,
                has_new_line=record.has_new_line,
                # As in llama-server a slot that has nothing to do has no limit to come to.
                n_remain=max(n_predict - row.output_tokens, 0) if slot.is_processing and n_predict >= 0 else -1,
                n_decoded=row.output_tokens if slot.is_processing else 0,
            )
        ],
    )
