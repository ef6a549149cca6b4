"""What a model is opened with, and the rule for engines whose memory is one number of cells.

Pure: numbers in, a `Placement` or a refusal out. Models that generate have a rule of their own (text_placement.py).

The rule. With `kv_cells` set, exactly that many (rounded up to `CELL_STEP`) or a refusal: a person who chose a number
shall not find another one. With `kv_cells` 0, `min(n_ctx_train * n_slots, DEFAULT_POOL_CELLS)`. If that does not fit
into `USABLE_RAM` of the available memory, it is halved until it does, down to `FLOOR_CELLS` or one trained
context, whichever is smaller.

Does not: read the machine's memory (machine.py), or decide who is evicted (room.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from localrun.errors import CannotFit
from localrun.models.fit import CELL_STEP, FLOOR_CELLS, USABLE_RAM, in_gb, wanted_cells


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

    What is not chosen here (empty, 0, None) is as the settings say.
    """

    n_kv_cells: int
    kv_bytes: int
    needed_bytes: int
    kv_type: str = ""
    n_slots: int = 0
    n_gpu_layers: int | None = None


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
            raise CannotFit(
                _refusal(name, needed, cells, available_bytes, _largest_fitting(estimate, cells, budget_bytes))
            )
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
    ways = ["close other programs", "stop other models (localrun stop)"]
    if fitting_cells:
        ways.insert(0, f"use fewer KV cells (--kv-cells {fitting_cells} would fit)")
    else:
        ways.append("take a smaller model or a stronger quantization")
    return (
        f"model '{name}' needs {in_gb(needed.total_bytes)} of memory (weights {in_gb(needed.weights_bytes)}, KV cache "
        f"of {cells} cells {in_gb(needed.kv_bytes)}, compute {in_gb(needed.compute_bytes)}, the process "
        f"{in_gb(needed.process_bytes)}) but {in_gb(available_bytes)} is available, of which {USABLE_RAM:.0%} may "
        f"be used; {', '.join(ways[:-1])}, or {ways[-1]}"
    )
