"""Who holds which KV cells, as runs of cells: for people, who see a map of them. Pure.

In one pool a cell may belong to several sequences, so runs are cut where the holder or the sharing changes; a map of
more than `MAX_RUNS` runs is drawn coarser, by looking at every second, fourth ... cell.

Does not: say what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Backend
from localrun.engine.kv_cells import KvCells
from localrun.engine.pool import Cells
from localrun.engine.request import Request
from localrun.engine.stream_cells import StreamCells
from localrun.wire import KvRun

# As often as a map is worth making while requests run.
INTERVAL_S = 0.25
MAX_RUNS = 512
# No request's: a prefix that is kept for later.
KEPT = 0
_EMPTY = -1


class KvNews:
    """Makes a map now and then."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._due_s = 0.0

    def since(self, cells: Cells, running: Sequence[Request], now_s: float) -> list[KvRun] | None:
        """The map, unless one was made a moment ago. The last one always comes: it is made whenever nobody runs."""
        if running and now_s < self._due_s:
            return None
        assert isinstance(cells, KvCells | StreamCells)
        self._due_s = now_s + INTERVAL_S
        owners = {request.seq: request.id for request in running if request.seq is not None}
        return kv_map(cells, self._backend.n_seqs + self._backend.n_staging_seqs, owners)


def kv_map(cells: KvCells | StreamCells, n_seqs: int, owners: Mapping[int, int]) -> list[KvRun]:
    """Runs of used cells in order. `owners` names the request of each running sequence; of those that share cells, the
    one with the highest sequence number is named."""
    if isinstance(cells, StreamCells):
        return _of_streams(cells, n_seqs, owners)
    holders = np.full(cells.span, _EMPTY, np.int64)
    for seq in sorted(range(n_seqs), key=lambda seq: (seq in owners, seq)):
        holders[cells.cells_of(seq)] = owners.get(seq, KEPT)
    is_shared = cells.refs[: cells.span] > 1
    stride = 1
    while True:
        runs = _runs(holders[::stride], is_shared[::stride], stride, cells.span)
        if len(runs) <= MAX_RUNS:
            return runs
        stride *= 2


def _of_streams(cells: StreamCells, n_seqs: int, owners: Mapping[int, int]) -> list[KvRun]:
    lengths = [cells.length(seq) for seq in range(n_seqs)]
    return [
        KvRun(seq * cells.n_cells, length, owners.get(seq, KEPT), False) for seq, length in enumerate(lengths) if length
    ]


def _runs(holders: NDArray[np.int64], is_shared: NDArray[np.bool_], stride: int, span: int) -> list[KvRun]:
    if not holders.size:
        return []
    kinds = holders * 2 + is_shared
    starts = np.flatnonzero(np.concatenate(([True], kinds[1:] != kinds[:-1])))
    ends: Sequence[int] = [*(starts[1:] * stride).tolist(), span]
    return [
        KvRun(start * stride, end - start * stride, int(holders[start]), bool(is_shared[start]))
        for start, end in zip(starts.tolist(), ends, strict=True)
        if holders[start] != _EMPTY
    ]
