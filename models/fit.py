"""Whether a model fits a machine, roughly, before its file is here.

Pure arithmetic on sizes that a download page tells. Does not: know any machine, or replace the estimate that is made
from a file's own header (`memory`, `fit_choice`).
"""

from __future__ import annotations

from typing import Final

from .fit_devices import USABLE_RAM

USABLE_FRACTION: Final = USABLE_RAM
# The context that a model should have here to be worth its download.
ROUGH_CELLS: Final = 8_192

# One cell of a layer in f16: 8 heads of 128 for keys and as many for values, as most models since 2024 have.
_LAYER_CELL_BYTES = 2 * 8 * 128 * 2
# The same for a model whose layers are unknown, as a share of its weights: what models of 1 to 70 billion have.
_KV_SHARE = 0.25
# Compute buffers, the process, and its vocabulary.
_REST_BYTES = 350 * 1024 * 1024


def rough_bytes(weights_bytes: int, *, n_layers: int | None = None, n_cells: int = ROUGH_CELLS) -> int:
    """About what an engine takes for weights of that size and `n_cells` tokens of context, within a third."""
    if n_layers is None:
        kv_bytes = int(weights_bytes * _KV_SHARE * n_cells / ROUGH_CELLS)
    else:
        kv_bytes = n_layers * _LAYER_CELL_BYTES * n_cells
    return weights_bytes + kv_bytes + _REST_BYTES


def fits_roughly(
    weights_bytes: int, free_bytes: int, *, n_layers: int | None = None, n_cells: int = ROUGH_CELLS
) -> bool:
    """Whether weights of that size can run in `free_bytes` of memory (RAM, or RAM and GPU together)."""
    return rough_bytes(weights_bytes, n_layers=n_layers, n_cells=n_cells) <= free_bytes * USABLE_FRACTION
