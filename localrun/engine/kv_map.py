"""Who holds which KV cells, as runs of cells: for people, who see a map of them. Pure.

In one pool a cell may belong to several sequences, so runs are cut where the holder or the sharing changes. Streams
that decode together alternate cell by cell: a map of more than `MAX_RUNS` runs is drawn coarser, in parts inside of
which everybody's cells are put together. How many cells a request has stays exact, and where they lie is right but for
a part.

Does not: say what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Backend
from localrun.engine.cache.kv_cells import KvCells
from localrun.engine.cache.pool import Cells
from localrun.engine.cache.stream_cells import StreamCells
from localrun.engine.request import Request
from localrun.wire import KvRun

# As often as a map is worth making while requests run.
INTERVAL_S = 0.25
MAX_RUNS = 512  # a power of two, for parts are put together by twos
# No request's: a prefix that is kept for later.
KEPT = 0


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
    requests = [KEPT, *owners.values()]
    kinds = {seq: 1 + 2 * index for index, seq in enumerate(owners, 1)}
    # Of each cell: 0 where it is empty, else 1 + 2 * (index into `requests`), and 1 more where it is shared. Filled up
    # to as many whole rows as a map may have runs.
    kind_of = np.zeros(MAX_RUNS * -(-cells.span // MAX_RUNS), np.int32)
    for seq in sorted(range(n_seqs), key=lambda seq: (seq in owners, seq)):
        kind_of[cells.cells_of(seq)] = kinds.get(seq, 1)
    kind_of[: cells.span] += cells.refs[: cells.span] > 1
    is_other = kind_of[1:] != kind_of[:-1]
    if np.count_nonzero(is_other) < MAX_RUNS:
        starts = np.concatenate(([0], np.flatnonzero(is_other) + 1))[: kind_of.size]
        sizes, found = np.diff(starts, append=kind_of.size), kind_of[starts].astype(np.int64)
    else:
        starts, sizes, found = _coarse(kind_of.reshape(MAX_RUNS, -1), 1 + 2 * len(requests))
    return [
        KvRun(start, size, requests[(kind - 1) // 2], kind % 2 == 0)
        for start, size, kind in zip(starts.tolist(), sizes.tolist(), found.tolist(), strict=True)
        if kind
    ]


def _of_streams(cells: StreamCells, n_seqs: int, owners: Mapping[int, int]) -> list[KvRun]:
    lengths = [cells.length(seq) for seq in range(n_seqs)]
    return [
        KvRun(seq * cells.n_cells, length, owners.get(seq, KEPT), False) for seq, length in enumerate(lengths) if length
    ]


def _coarse(rows: NDArray[np.int32], n_kinds: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Starts, sizes and kinds of at most `MAX_RUNS` runs: in each row of cells, or in two, four ... of them, those of
    one kind lie together, the empty ones last."""
    keys = rows + np.arange(len(rows), dtype=np.int32)[:, np.newaxis] * n_kinds
    counts = np.bincount(keys.ravel(), minlength=len(rows) * n_kinds).reshape(len(rows), n_kinds)
    counts[:, 0] = 0
    while np.count_nonzero(counts) > MAX_RUNS and len(counts) > 1:
        counts = counts[0::2] + counts[1::2]
    begins = np.arange(len(counts))[:, np.newaxis] * (rows.size // len(counts))
    starts = begins + np.cumsum(counts, axis=1) - counts
    at, found = np.nonzero(counts)
    return starts[at, found], counts[at, found], found
