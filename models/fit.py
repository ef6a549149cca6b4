"""About what a model takes of a machine's memory, before its file is here.

Pure arithmetic on the size that a download page tells. Does not: know any machine, or replace the estimate that is made
from a file's own header (`memory`, `fit_choice`).
"""

from __future__ import annotations

from typing import Final

# The context that a model should have here to be worth its download.
ROUGH_CELLS: Final = 8_192

# Of a KV cache of so many cells in f16, as a share of the weights: what models of 1 to 70 billion have.
_KV_SHARE = 0.25
# Compute buffers, the process, and its vocabulary.
_REST_BYTES = 350 * 1024 * 1024


def rough_bytes(weights_bytes: int) -> int:
    """About what an engine takes for weights of that size and `ROUGH_CELLS` tokens of context, within a third."""
    return weights_bytes + int(weights_bytes * _KV_SHARE) + _REST_BYTES
