"""How a model is opened: GPU layers, KV cells, their type, slots; or why it cannot be.

Pure: numbers in, a `Placement` or a refusal out. The rule for models that generate is `models.fit`. Embedding
engines are opened for one input instead of a pool of slots: `kv_cells` if it is set, else 2,048 tokens for models that
read a text in one piece and 8,192 for others, never more than the model was trained for; halved until it fits into
`USABLE_RAM` of the available memory, down to `FLOOR_CELLS` or one trained context, whichever is smaller.

What the settings name is taken as it is (rounded up to `CELL_STEP`) or refused: a person who chose a number shall not
find another one. Slots are an exception where memory is so short that fewer are all there is.
Does not: read the machine's memory (machine.py), or decide who is evicted (room.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from localrun.config import AUTO_KV_TYPE, Settings
from localrun.errors import CannotFit
from localrun.models import memory
from localrun.models.fit import (
    CELL_STEP,
    FLOOR_CELLS,
    USABLE_RAM,
    Fit,
    FitRequest,
    Machine,
    choose,
    in_gb,
    shared_bytes,
    wanted_cells,
    whole_steps,
)
from localrun.models.gguf.header import RANK, Header
from localrun.models.memory import MemoryEstimate, projector_memory
from localrun.models.storage.model import Model


class Placement(NamedTuple):
    """What to load with: `n_kv_cells` cells of `kv_bytes` together, expected to take `needed_bytes` of RAM in all, of
    which `shared_bytes` are those of GPUs that compute in it.

    What is not chosen here (empty, 0, None) is as the settings say. The weights and cells
    of the model's draft model take `draft_bytes` if it fits, too, and its projector `projector_bytes`.
    """

    n_kv_cells: int
    kv_bytes: int
    needed_bytes: int
    kv_type: str = ""
    n_slots: int = 0
    n_gpu_layers: int | None = None
    draft_bytes: int = 0
    projector_bytes: int = 0
    shared_bytes: int = 0


def _halves(cells: int) -> Iterator[int]:
    while cells > CELL_STEP:
        cells = whole_steps(cells // 2)
        yield cells


def _refusal(name: str, needed: MemoryEstimate, cells: int, available_bytes: int, fitting_cells: int) -> str:
    fewer = f"use fewer KV cells (--kv-cells {fitting_cells} would fit)" if fitting_cells else ""
    return (
        f"model '{name}' needs {in_gb(needed.total_bytes)} of memory (weights {in_gb(needed.weights_bytes)}, KV cache "
        f"of {cells} cells {in_gb(needed.kv_bytes)}, compute {in_gb(needed.compute_bytes)}, the process "
        f"{in_gb(needed.process_bytes)}) but {in_gb(available_bytes)} is available, of which {USABLE_RAM:.0%} may "
        f"be used; {_ways_out(fewer)}"
    )


def _ways_out(best: str) -> str:
    """What would help, `best` first; "" where only another model would fit."""
    ways = ["close other programs", "stop other models (localrun stop)"]
    if best:
        ways.insert(0, best)
    else:
        ways.append("take a smaller model or a stronger quantization")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"


def place_embeddings(model: Model, settings: Settings, available_bytes: int, *, n_ctx: int = 0) -> Placement:
    """The placement by the rule above; `n_kv_cells` is the longest input. Raises CannotFit with both sides of the
    comparison, and what would help."""
    header = model.header
    most = max(n_ctx, memory.most_embedding_tokens(header, settings.kv_cells))
    projector = None if header.pooling == RANK else model.projector_header
    projector_bytes = 0 if projector is None else projector_memory(projector).total_bytes

    def estimate(n_cells: int) -> MemoryEstimate:
        return memory.embedding_estimate(
            header, n_tokens=min(n_cells, most), n_rows=settings.batch_tokens, kv_type=settings.plain_kv_type
        )._replace(adapter_bytes=model.adapter_bytes, projector_bytes=projector_bytes)

    usable_bytes = int(available_bytes * USABLE_RAM)
    cells = wanted_cells(n_ctx_train=most, n_slots=1, kv_cells=0)
    floor = min(cells, whole_steps(min(most, FLOOR_CELLS)))
    while (needed := estimate(cells)).total_bytes > usable_bytes:
        if cells <= floor:
            fitting = next((fewer for fewer in _halves(cells) if estimate(fewer).total_bytes <= usable_bytes), 0)
            raise CannotFit(_refusal(model.name, needed, cells, available_bytes, fitting))
        cells = max(floor, whole_steps(cells // 2))
    # A whole step may be more than the model was trained for, and than it must be sent.
    return Placement(min(cells, most), needed.kv_bytes, needed.total_bytes, projector_bytes=projector_bytes)


def wish_of(
    settings: Settings,
    *,
    n_ctx: int = 0,
    n_roomy_cells: int = 0,
    adapter_bytes: int = 0,
    projector: Header | None = None,
    draft: Header | None = None,
) -> FitRequest:
    """What the settings leave open, and what they do not, for a model with so much in adapters, its projector and its
    draft model."""
    return FitRequest(
        n_slots=settings.slots,
        n_kv_cells=settings.kv_cells,
        kv_type=settings.kv_type,
        n_gpu_layers=settings.gpu_layers,
        n_ubatch=settings.batch_tokens,
        adapter_bytes=adapter_bytes,
        projector=projector,
        draft=draft,
        n_ctx=n_ctx,
        n_roomy_cells=n_roomy_cells,
    )


def place_text(name: str, header: Header, machine: Machine, wish: FitRequest) -> Placement:
    """The placement of a model on a machine with its projector, and with its draft model if there is room for both.

    Without known GPUs the number of layers there is left to the engine. Raises CannotFit with both sides of the
    comparison, and what would help.
    """
    fit = choose(header, machine, wish)
    if not fit.fits:
        raise CannotFit(refusal(name, header, fit, machine, wish))
    draft_needed, on_gpus_bytes = fit.estimate.draft, shared_bytes(fit.devices, machine)
    return Placement(
        n_kv_cells=fit.n_kv_cells,
        kv_bytes=fit.estimate.kv_bytes,
        needed_bytes=fit.devices[0].total_bytes + on_gpus_bytes,
        kv_type=fit.kv_type,
        n_slots=fit.n_slots,
        n_gpu_layers=fit.n_gpu_layers if machine.gpus else wish.n_gpu_layers,
        draft_bytes=0 if draft_needed is None else draft_needed.weights_bytes + draft_needed.kv_bytes,
        projector_bytes=fit.estimate.projector_bytes,
        shared_bytes=on_gpus_bytes,
    )


def refusal(name: str, header: Header, fit: Fit, machine: Machine, wish: FitRequest) -> str:
    """Why `fit`, the choice for this wish, is none, as a sentence with the ways out."""
    needed = fit.estimate
    rest_bytes = needed.staging_bytes + needed.process_bytes + needed.adapter_bytes
    seeing = f", its projector {in_gb(needed.projector_bytes)}" if needed.projector_bytes else ""
    on_gpus = "".join(
        f", {'at most' if gpu.is_shared else 'and'} {in_gb(gpu.free_bytes)} on {gpu.name}" for gpu in machine.gpus
    )
    return (
        f"model '{name}' needs {in_gb(needed.total_bytes)} of memory (weights {in_gb(needed.weights_bytes)}, KV cache "
        f"of {fit.n_kv_cells} cells {in_gb(needed.kv_bytes)}, compute {in_gb(needed.compute_bytes)}, the process and "
        f"long prompts in the background {in_gb(rest_bytes)}{seeing}) but {in_gb(machine.ram_bytes)} is available, of "
        f"which {USABLE_RAM:.0%} may be used{on_gpus}; {_ways_out_of(header, machine, wish)}"
    )


def _ways_out_of(header: Header, machine: Machine, wish: FitRequest) -> str:
    """Of what was asked for, that which is too much by itself comes first."""
    if wish.n_kv_cells:
        fit = choose(header, machine, wish._replace(n_kv_cells=0))
        if fit.fits and fit.n_kv_cells < wish.n_kv_cells:
            return _ways_out(f"use fewer KV cells (--kv-cells {fit.n_kv_cells} would fit)")
    if wish.n_ctx:
        fit = choose(header, machine, wish._replace(n_ctx=0))
        if fit.fits:
            return _ways_out(f"use a smaller num_ctx than {wish.n_ctx} ({fit.n_ctx} would fit)")
    if wish.kv_type == "f16" and choose(header, machine, wish._replace(kv_type=AUTO_KV_TYPE)).fits:
        return _ways_out("leave kv_type f16 out (q8_0 would fit)")
    if wish.n_gpu_layers > 0:
        fit = choose(header, machine, wish._replace(n_gpu_layers=-1))
        if fit.fits:
            return _ways_out(
                f"put fewer layers on the GPU than {wish.n_gpu_layers} (num_gpu, gpu_layers: {fit.n_gpu_layers} "
                f"would fit)"
            )
    return _ways_out("")
