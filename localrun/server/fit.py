"""`GET /localrun/v1/fit?model=NAME`: how a model would be opened on this machine, and what each device would hold.

    {"model", "fits", "slots", "kv_cells", "kv_type", "context", "gpu_layers", "layers", "devices": [...],
     "total_bytes", "resident_bytes", "process_bytes", "background_bytes", "prefix_cache_bytes", "idle_bytes",
     "notes": [...], "problem"}

A device is `{"name", "layers", "weights_bytes", "kv_bytes", "compute_bytes", "other_bytes", "total_bytes",
"usable_bytes", "free_bytes"}`, RAM first; its `other_bytes` are those of the process and of long prompts in the
background. `idle_bytes` is what idle models hold of RAM; they would give way, so it is counted as free. `problem` is
the refusal that a request would get, or null.

Runs in the daemon's event loop; files are read in a thread. The rule is the one that models are loaded by.

Does not: load anything.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.routing import Route

from localrun.errors import BadRequest
from localrun.models.fit import DeviceUse, Fit, Machine, choose
from localrun.server.engines import machine
from localrun.server.engines.gpus import installed_gpus
from localrun.server.engines.text_placement import refusal, wish_of
from localrun.server.engines.use import Use, pooling_for
from localrun.server.http.endpoint import route
from localrun.server.http.exchange import Exchange
from localrun.server.http.query import parameter
from localrun.server.runtime import Runtime


def routes(runtime: Runtime) -> list[Route]:
    """The route, bound to a runtime."""
    return [route("/localrun/v1/fit", runtime, partial(_fit, asyncio.Lock()), methods=["GET"])]


async def _fit(one_at_a_time: asyncio.Lock, runtime: Runtime, exchange: Exchange) -> None:
    """Asking the GPUs takes a process, so there is one such question at a time."""
    await exchange.read_body()
    async with exchange.while_connected(), one_at_a_time:
        await exchange.answer_json(await _explained(runtime, exchange))


async def _explained(runtime: Runtime, exchange: Exchange) -> dict[str, Any]:
    name = parameter(exchange, "model")
    if not name:
        raise BadRequest("model is missing: /localrun/v1/fit?model=NAME", field="model")
    model = await asyncio.to_thread(runtime.store.resolve, name)
    # Raises for models that only make vectors: they have no slots or cells to choose.
    pooling_for(model, Use.TEXT)
    idle_bytes = _idle_bytes(runtime, model.name)
    here = Machine(machine.available_bytes() + idle_bytes, await installed_gpus())
    wish = wish_of(runtime.settings, adapter_bytes=model.adapter_bytes)
    fit = await asyncio.to_thread(choose, model.header, here, wish)
    return _answer(model.name, fit) | {
        "idle_bytes": idle_bytes,
        "prefix_cache_bytes": runtime.settings.ram_cache_bytes,
        "problem": None if fit.fits else refusal(model.name, fit, here, 0),
    }


def _idle_bytes(runtime: Runtime, name: str) -> int:
    """What would be given back for this model: the memory of idle engines, and of its own."""
    return sum(
        machine.private_bytes(resident.link.pid)
        for resident in runtime.supervisor.residents()
        if resident.link.pid is not None and (resident.can_be_evicted or resident.model.name == name)
    )


def _answer(name: str, fit: Fit) -> dict[str, Any]:
    return {
        "model": name,
        "fits": fit.fits,
        "slots": fit.n_slots,
        "kv_cells": fit.n_kv_cells,
        "kv_type": fit.kv_type,
        "context": fit.n_ctx,
        "gpu_layers": fit.n_gpu_layers,
        "layers": sum(use.n_layers for use in fit.devices),
        "devices": [_device(use) for use in fit.devices],
        "total_bytes": fit.estimate.total_bytes,
        "resident_bytes": fit.estimate.resident_bytes,
        "process_bytes": fit.estimate.process_bytes,
        "background_bytes": fit.estimate.staging_bytes,
        "notes": list(fit.notes),
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
