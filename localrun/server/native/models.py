"""The daemon's own routes about models: getting them, clearing up after them, and how one would be opened here.

In the answer of `fit` a device's `other_bytes` are those of the process and of long prompts in the background, and of
the projector and the draft model there. `idle_bytes` is what idle models hold of RAM; they would give way, so it is
counted as free. The rule is the one that models are loaded by.

Runs in the daemon's event loop; files are read in a thread. `/api/pull` itself is Ollama's.
Does not: load anything, rank search results (the hub does), or know what garbage is (models/naming.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest, DownloadFailed, Forbidden, Unavailable
from localrun.models import adapters, catalog, naming
from localrun.models.catalog import Entry
from localrun.models.download import huggingface
from localrun.models.download.huggingface import HubHit
from localrun.models.draft import find
from localrun.models.fit import DeviceUse, Fit, choose
from localrun.models.memory import projector_memory
from localrun.models.name import ModelName
from localrun.models.storage.model import Model
from localrun.server.engines.machine import answering_gpus
from localrun.server.engines.placement import refusal, wish_of
from localrun.server.engines.resident import Use, draft_problem, own_draft, pooling_for, speculates
from localrun.server.http.exchange import Exchange, decode_body, parameter, whole_number
from localrun.server.runtime import Runtime
from localrun.snapshot import PullRow

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_QUERY_CHARS = 200


class Pulls(msgspec.Struct, frozen=True, kw_only=True):
    """The downloads that run, and those that ended lately."""

    pulls: list[PullRow]


class CancelledPull(msgspec.Struct, frozen=True, kw_only=True):
    """The download ends; what came is kept for the next one."""

    model: str
    cancelled: bool


class CatalogAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of the catalogue."""

    models: list[Entry]


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the catalogue and on the hub; `problem` says why the hub did not answer."""

    catalog: list[Entry]
    hub: list[HubHit]
    problem: str | None


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted."""

    freed_bytes: int
    deleted: list[str]
    kept_blobs: int
    kept_partial_bytes: int


class FitAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How a model would be opened here; `problem` is the refusal that a request would get."""

    model: str
    fits: bool
    slots: int
    kv_cells: int
    kv_type: str
    context: int
    gpu_layers: int
    layers: int
    devices: list[dict[str, Any]]
    total_bytes: int
    resident_bytes: int
    process_bytes: int
    background_bytes: int
    prefix_cache_bytes: int
    idle_bytes: int
    projector: dict[str, Any] | None
    draft: dict[str, Any] | None
    load: dict[str, Any]
    notes: list[str]
    problem: str | None


async def list_pulls(runtime: Runtime, exchange: Exchange) -> None:
    rows = [row for row in runtime.pulls.rows() if exchange.caller.may_use_model(row.model)]
    await exchange.answer_redacted(Pulls(pulls=rows))


async def cancel_pull(runtime: Runtime, exchange: Exchange) -> None:
    model = parameter(exchange, "model")
    if not model:
        raise BadRequest("model is required: DELETE /localrun/v1/pulls?model=NAME", field="model")
    exchange.caller.check_model(model)
    await runtime.pulls.cancel(model)
    await exchange.answer_json(CancelledPull(model=model, cancelled=True))


async def list_catalog(_: Runtime, exchange: Exchange) -> None:
    model = parameter(exchange, "model")
    found = catalog.find(ModelName.parse(model)) if model else None
    entries = catalog.entries() if not model else () if found is None else (found.entry,)
    await exchange.answer_json(CatalogAnswer(models=list(entries)))


async def search_models(runtime: Runtime, exchange: Exchange) -> None:
    query = parameter(exchange, "query").strip()
    if len(query) > MAX_QUERY_CHARS:
        raise BadRequest(f"query has {len(query)} characters; the limit is {MAX_QUERY_CHARS}", field="query")
    limit = whole_number(exchange, "limit", default=DEFAULT_LIMIT, most=MAX_LIMIT)
    hits: list[HubHit] = []
    problem: str | None = None
    await exchange.read_body()
    if query:
        try:
            async with exchange.while_connected():
                hits = await huggingface.search(query, hub=runtime.pulls.hub, limit=limit)
        except (DownloadFailed, Unavailable) as error:
            # The catalogue answers without a network.
            problem = error.message
    await exchange.answer_json(SearchAnswer(catalog=list(catalog.search(query)), hub=hits, problem=problem))


class GarbageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Uploaded files that no model names are spared until they are `min_age_s` old, downloads that were broken off
    until `partial_min_age_s` after their last byte."""

    min_age_s: Annotated[float, Meta(ge=0.0)] = naming.MIN_AGE_S
    partial_min_age_s: Annotated[float, Meta(ge=0.0)] = naming.PARTIAL_MIN_AGE_S


async def collect(runtime: Runtime, exchange: Exchange) -> None:
    body = decode_body(await exchange.read_body() or b"{}", GarbageBody)
    is_early = body.min_age_s < naming.MIN_AGE_S or body.partial_min_age_s < naming.PARTIAL_MIN_AGE_S
    if is_early and not exchange.caller.is_admin:
        raise Forbidden(
            f"a min_age_s of less than {naming.MIN_AGE_S:g} and a partial_min_age_s of less than "
            f"{naming.PARTIAL_MIN_AGE_S:g} are for admins: others may be uploading or downloading those files"
        )
    collected = await asyncio.to_thread(
        naming.collect_garbage,
        runtime.store,
        now_s=time.time(),
        min_age_s=body.min_age_s,
        partial_min_age_s=body.partial_min_age_s,
    )
    deleted = [str(path) for path in collected.files]
    await exchange.answer_redacted(
        Collected(
            freed_bytes=collected.freed_bytes,
            deleted=deleted,
            kept_blobs=collected.kept_blobs,
            kept_partial_bytes=collected.kept_partial_bytes,
        )
    )


async def explain_fit(runtime: Runtime, exchange: Exchange) -> None:
    """Asking the GPUs takes a process, so there is one such question at a time."""
    await exchange.read_body()
    async with exchange.while_connected(), runtime.asks_gpus:
        await exchange.answer_redacted(await _explained(runtime, exchange))


async def _explained(runtime: Runtime, exchange: Exchange) -> FitAnswer:
    name = parameter(exchange, "model")
    if not name:
        raise BadRequest("model is missing: /localrun/v1/fit?model=NAME", field="model")
    caller = exchange.caller
    runtime.targets.check_own(caller, name)
    if drafter := parameter(exchange, "draft"):
        caller.check_model(drafter)
    adapted = await asyncio.to_thread(adapters.resolve, runtime.store, name, settings=runtime.settings)
    model = adapted.model
    # Raises for models that only make vectors: they have no slots or cells to choose.
    pooling_for(model, Use.TEXT)
    here, idle_bytes = runtime.supervisor.room_for(model.name, await answering_gpus())
    draft, left_out = await asyncio.to_thread(_draft, runtime, model, drafter)
    if not caller.may_use_model(own_draft(runtime.settings, model)):
        left_out = []
    header = None if draft is None else draft.header
    adapter_bytes = model.adapter_bytes
    if adapted.adapters is not None:
        adapter_bytes = sum(adapter.size_bytes for adapter in adapted.adapters)
    load = runtime.supervisor.loads.asked(model)
    runtime.supervisor.loads.check(model)
    wish = wish_of(
        runtime.settings.with_load(load), n_ctx=load.num_ctx or 0, adapter_bytes=adapter_bytes,
        projector=model.projector_header, draft=header,
    )  # fmt: skip
    fit = await asyncio.to_thread(choose, model.header, here, wish)
    return FitAnswer(
        model=model.name,
        fits=fit.fits,
        slots=fit.n_slots,
        kv_cells=fit.n_kv_cells,
        kv_type=fit.kv_type,
        context=fit.n_ctx,
        gpu_layers=fit.n_gpu_layers,
        layers=sum(use.n_layers for use in fit.devices),
        devices=[_device(use) for use in fit.devices],
        total_bytes=fit.estimate.total_bytes,
        resident_bytes=fit.estimate.resident_bytes,
        process_bytes=fit.estimate.process_bytes,
        background_bytes=fit.estimate.staging_bytes,
        prefix_cache_bytes=runtime.settings.ram_cache_bytes,
        idle_bytes=idle_bytes,
        projector=_projector_part(model, fit),
        draft=None if draft is None else _draft_part(draft.name if caller.may_use_model(draft.name) else "", fit),
        load=caller.load_shown(load.said),
        notes=[*fit.notes, *left_out],
        problem=None
        if fit.fits
        else refusal(model.name, model.header, fit, here, wish) + runtime.supervisor.loads.said_by_table(model, load),
    )


def _draft(runtime: Runtime, model: Model, asked: str) -> tuple[Model | None, list[str]]:
    """In a thread: reads the disk. The draft model that `model` would be opened with, and why it would be without its
    own. Raises BadRequest for one that was asked for."""
    if asked:
        return find(runtime.store, asked, model=model.name, target=model.header), []
    name = own_draft(runtime.settings, model)
    if not name or not speculates(runtime.settings, model):
        return None, []
    try:
        return find(runtime.store, name, model=model.name, target=model.header), []
    except BadRequest as error:
        return None, [f"without its draft model: {draft_problem(runtime.settings, model, error)}"]


def _projector_part(model: Model, fit: Fit) -> dict[str, Any] | None:
    if model.projector_header is None:
        return None
    needed = projector_memory(model.projector_header)
    return {
        "name": model.projector_header.path.name,
        "device": next((use.name for use in fit.devices[1:] if use.n_layers), fit.devices[0].name),
        "weights_bytes": needed.weights_bytes,
        "compute_bytes": needed.compute_bytes,
        "total_bytes": needed.total_bytes,
    }


def _draft_part(name: str, fit: Fit) -> dict[str, Any] | None:
    needed = fit.estimate.draft
    if needed is None:
        return None
    return {
        "model": name,
        "device": next(use.name for use in fit.devices if use.n_layers),
        "weights_bytes": needed.weights_bytes,
        "kv_bytes": needed.kv_bytes,
        "compute_bytes": needed.compute_bytes,
        "other_bytes": needed.process_bytes,
        "total_bytes": needed.total_bytes,
    }


def _device(use: DeviceUse) -> dict[str, Any]:
    return {
        "name": use.name,
        "layers": use.n_layers,
        "weights_bytes": use.weights_bytes,
        "kv_bytes": use.kv_bytes,
        "compute_bytes": use.compute_bytes,
        "other_bytes": use.other_bytes,
        "total_bytes": use.total_bytes,
        "usable_bytes": use.usable_bytes,
        "free_bytes": use.free_bytes,
    }
