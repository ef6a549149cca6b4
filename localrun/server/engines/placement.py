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

from collections.abc import Callable
from typing import NamedTuple, Protocol

from localrun.config import Settings
from localrun.errors import CannotFit
from localrun.models import memory
from localrun.models.fit import CELL_STEP, FLOOR_CELLS, USABLE_RAM, Fit, Machine, Wish, choose, in_gb, wanted_cells
from localrun.models.gguf.header import Header
from localrun.models.memory import MemoryEstimate
from localrun.models.storage.store import Model


class Estimate(Protocol):
    """What `models.memory.estimate` answers, in bytes."""

    @property
    def weights_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def compute_bytes(self) -> int: ...
    @property
    def process_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


class Placement(NamedTuple):
    """What to load with: `n_kv_cells` cells of `kv_bytes` together, expected to take `needed_bytes` of RAM in all.

    What is not chosen here (empty, 0, None) is as the settings say. The weights and cells
    of the model's draft model take `draft_bytes` if it fits, too.
    """

    n_kv_cells: int
    kv_bytes: int
    needed_bytes: int
    kv_type: str = ""
    n_slots: int = 0
    n_gpu_layers: int | None = None
    draft_bytes: int = 0


def place(
    *,
    name: str,
    n_ctx_train: int,
    n_slots: int,
    kv_cells: int,
    available_bytes: int,
    estimate: Callable[[int], Estimate],
) -> Placement:
    """The placement by the rule above. `estimate` maps a number of cells to memory.

    Raises CannotFit with both sides of the comparison, and what would help.
    """
    budget_bytes = int(available_bytes * USABLE_RAM)
    cells = wanted_cells(n_ctx_train=n_ctx_train, n_slots=n_slots, kv_cells=kv_cells)
    floor = cells if kv_cells else min(cells, _whole_steps(min(n_ctx_train, FLOOR_CELLS)))
    while (needed := estimate(cells)).total_bytes > budget_bytes:
        if cells <= floor:
            fitting_cells = _largest_fitting(estimate, cells, budget_bytes)
            raise CannotFit(_refusal(name, needed, cells, available_bytes, fitting_cells))
        cells = max(floor, _whole_steps(cells // 2))
    return Placement(cells, needed.kv_bytes, needed.total_bytes)


def _whole_steps(cells: int) -> int:
    return max(1, -(-cells // CELL_STEP)) * CELL_STEP


def _largest_fitting(estimate: Callable[[int], Estimate], cells: int, budget_bytes: int) -> int:
    """The largest halving of `cells` that fits, 0 when not even one step of cells does."""
    while cells > CELL_STEP:
        cells = _whole_steps(cells // 2)
        if estimate(cells).total_bytes <= budget_bytes:
            return cells
    return 0


def _refusal(name: str, needed: Estimate, cells: int, available_bytes: int, fitting_cells: int) -> str:
    return (
        f"model '{name}' needs {in_gb(needed.total_bytes)} of memory (weights {in_gb(needed.weights_bytes)}, KV cache "
        f"of {cells} cells {in_gb(needed.kv_bytes)}, compute {in_gb(needed.compute_bytes)}, the process "
        f"{in_gb(needed.process_bytes)}) but {in_gb(available_bytes)} is available, of which {USABLE_RAM:.0%} may "
        f"be used; {_ways_out(fitting_cells)}"
    )


def _ways_out(fitting_cells: int) -> str:
    """What would help; `fitting_cells` would fit, 0 if nothing does."""
    ways = ["close other programs", "stop other models (localrun stop)"]
    if fitting_cells:
        ways.insert(0, f"use fewer KV cells (--kv-cells {fitting_cells} would fit)")
    else:
        ways.append("take a smaller model or a stronger quantization")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"


def place_embeddings(model: Model, settings: Settings, available_bytes: int) -> Placement:
    """The placement by the rule above; `n_kv_cells` is the longest input. Raises CannotFit."""
    header = model.header
    most = memory.most_embedding_tokens(header, settings.kv_cells)

    def estimate(n_cells: int) -> MemoryEstimate:
        return memory.embedding_estimate(
            header, n_tokens=min(n_cells, most), n_rows=settings.batch_tokens, kv_type=settings.plain_kv_type
        )._replace(adapter_bytes=model.adapter_bytes)

    placement = place(
        name=model.name,
        n_ctx_train=most,
        n_slots=1,
        kv_cells=0,
        available_bytes=available_bytes,
        estimate=estimate,
    )
    # Rounded up to whole steps there; a model must not be sent more than it was trained for.
    return placement._replace(n_kv_cells=min(placement.n_kv_cells, most))


def wish_of(settings: Settings, *, adapter_bytes: int = 0, draft: Header | None = None) -> Wish:
    """What the settings leave open, and what they do not, for a model with so much in adapters, and its draft model."""
    return Wish(
        n_slots=settings.slots,
        n_kv_cells=settings.kv_cells,
        kv_type=settings.kv_type,
        n_gpu_layers=settings.gpu_layers,
        n_ubatch=settings.batch_tokens,
        adapter_bytes=adapter_bytes,
        draft=draft,
    )


def place_text(
    name: str,
    header: Header,
    settings: Settings,
    machine: Machine,
    *,
    adapter_bytes: int = 0,
    draft: Header | None = None,
) -> Placement:
    """The placement of a model on a machine, with its draft model if there is room for both.

    Without known GPUs the number of layers there is left to the engine. Raises CannotFit with both sides of the
    comparison, and what would help.
    """
    wish = wish_of(settings, adapter_bytes=adapter_bytes, draft=draft)
    fit = choose(header, machine, wish)
    if not fit.fits:
        raise CannotFit(refusal(name, fit, machine, _fitting_cells(header, machine, wish)))
    draft_needed = fit.estimate.draft
    return Placement(
        n_kv_cells=fit.n_kv_cells,
        kv_bytes=fit.estimate.kv_bytes,
        needed_bytes=fit.devices[0].total_bytes,
        kv_type=fit.kv_type,
        n_slots=fit.n_slots,
        n_gpu_layers=fit.n_gpu_layers if machine.gpus else wish.n_gpu_layers,
        draft_bytes=0 if draft_needed is None else draft_needed.weights_bytes + draft_needed.kv_bytes,
    )


def refusal(name: str, fit: Fit, machine: Machine, fitting_cells: int) -> str:
    """Why `fit` is none, as a sentence. `fitting_cells` would fit; 0 if nothing does."""
    needed = fit.estimate
    rest_bytes = needed.staging_bytes + needed.process_bytes + needed.adapter_bytes
    on_gpus = "".join(f", and {in_gb(gpu.free_bytes)} on {gpu.name}" for gpu in machine.gpus)
    return (
        f"model '{name}' needs {in_gb(needed.total_bytes)} of memory (weights {in_gb(needed.weights_bytes)}, KV cache "
        f"of {fit.n_kv_cells} cells {in_gb(needed.kv_bytes)}, compute {in_gb(needed.compute_bytes)}, the process and "
        f"long prompts in the background {in_gb(rest_bytes)}) but {in_gb(machine.ram_bytes)} is available, of which "
        f"{USABLE_RAM:.0%} may be used{on_gpus}; {_ways_out(fitting_cells)}"
    )


def _fitting_cells(header: Header, machine: Machine, wish: Wish) -> int:
    """Cells that would fit instead of those asked for; 0 when none would, or none were asked for."""
    if not wish.n_kv_cells:
        return 0
    fit = choose(header, machine, wish._replace(n_kv_cells=0))
    return fit.n_kv_cells if fit.fits and fit.n_kv_cells < wish.n_kv_cells else 0
