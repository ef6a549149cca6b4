"""A mirror of llama.cpp's unified KV pool: which sequence holds which cell. Pure.

llama.cpp does not tell where it puts tokens, but the placement is a fixed rule (`llama_kv_cache::find_slot`, non-
contiguous mode): scan upwards from the head, wrap round, take empty cells; begin at 0 when the head has run further
than the used cells plus twice the batch. Following it here gives the exact number of free cells before a step, the
cells that sequences share, and the used span, which is what attention costs.

Invariant: `refs[cell]` is the number of sequences that list the cell; positions of a sequence are 0..length-1.
Does not: call a backend. `kv_pool.py` keeps the two in step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROW = 256


class KvCells:
    """`n_cells` cells and sequences 0..n_seqs-1, all empty at first."""

    def __init__(self, n_cells: int, n_seqs: int) -> None:
        self.n_cells = n_cells
        self.refs: NDArray[np.int32] = np.zeros(n_cells, np.int32)
        self.n_used = 0
        self._head = 0
        self._cells: list[NDArray[np.int32]] = [np.empty(_GROW, np.int32) for _ in range(n_seqs)]
        self._lengths = [0] * n_seqs

    @property
    def n_free(self) -> int:
        return self.n_cells - self.n_used

    @property
    def n_shared(self) -> int:
        """Cells that more than one sequence holds."""
        return int(np.count_nonzero(self.refs > 1))

    @property
    def span(self) -> int:
        """One more than the highest used cell: every row attends over this many cells, used or not."""
        used = np.flatnonzero(self.refs)
        return int(used[-1]) + 1 if used.size else 0

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._lengths[seq]

    def cells_of(self, seq: int) -> NDArray[np.int32]:
        """The cells of a sequence in order of position. A view: do not keep it."""
        return self._cells[seq][: self._lengths[seq]]

    def place(self, rows: list[int]) -> None:
        """Append one token to the sequence of each row, in order. Raises ValueError when `rows` are more than free."""
        taken = self._find(len(rows))
        self.refs[taken] = 1
        self.n_used += len(rows)
        for cell, seq in zip(taken.tolist(), rows, strict=True):
            length = self._lengths[seq]
            if length == self._cells[seq].size:
                self._reserve(seq, length + 1)
            self._cells[seq][length] = cell
            self._lengths[seq] = length + 1

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """`target`, which holds exactly [0, start), also takes the cells of `source` at [start, end)."""
        if self._lengths[target] != start or end > self._lengths[source]:
            raise ValueError(f"cannot share [{start}, {end}) of {source} with {target}: lengths do not fit")
        cells = self._cells[source][start:end]
        self._reserve(target, end)
        self._cells[target][start:end] = cells
        self._lengths[target] = end
        self.refs[cells] += 1

    def swap(self, source: int, target: int, start: int, end: int) -> None:
        """`target` gives up its own cells at [start, end) and takes those of `source`."""
        own = self._cells[target][start:end].copy()
        cells = self._cells[source][start:end]
        self.refs[cells] += 1
        self._cells[target][start:end] = cells
        self._drop(own)

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        dropped = self._cells[seq][length : self._lengths[seq]].copy()
        self._lengths[seq] = min(length, self._lengths[seq])
        self._drop(dropped)

    def restore(self, seq: int, length: int) -> None:
        """An empty sequence comes back from a saved state of `length` tokens."""
        if self._lengths[seq]:
            raise ValueError(f"sequence {seq} is not empty")
        taken = self._find(length)
        self.refs[taken] = 1
        self.n_used += length
        self._reserve(seq, length)
        self._cells[seq][:length] = taken
        self._lengths[seq] = length

    def check_integrity(self) -> None:
        """Raises AssertionError if the reference counts do not follow from the sequences. O(cells)."""
        refs = np.zeros(self.n_cells, np.int32)
        for seq in range(len(self._lengths)):
            cells = self.cells_of(seq)
            assert np.unique(cells).size == cells.size, f"sequence {seq} lists a cell twice"
            refs[cells] += 1
        assert np.array_equal(refs, self.refs), "reference counts differ from what the sequences hold"
        assert int(np.count_nonzero(refs)) == self.n_used, "n_used differs from the cells in use"

    def _find(self, count: int) -> NDArray[np.int32]:
        if count > self.n_free:
            raise ValueError(f"{count} cells wanted, {self.n_free} free")
        if count == 0:
            return np.empty(0, np.int32)
        head = 0 if self._head > self.n_used + 2 * count else self._head
        run = self.refs[head : head + count]
        if run.size == count and not run.any():
            taken = np.arange(head, head + count, dtype=np.int32)
        else:
            free = np.flatnonzero(self.refs == 0).astype(np.int32)
            first = int(np.searchsorted(free, head))
            taken = np.roll(free, -first)[:count]
        self._head = int(taken[-1]) + 1
        return taken

    def _drop(self, cells: NDArray[np.int32]) -> None:
        self.refs[cells] -= 1
        freed = cells[self.refs[cells] == 0]
        if freed.size:
            self.n_used -= int(freed.size)
            self._head = min(self._head, int(freed.min()))

    def _reserve(self, seq: int, length: int) -> None:
        have = self._cells[seq].size
        if length > have:
            bigger = np.empty(max(length + _GROW, have * 2), np.int32)
            bigger[:have] = self._cells[seq]
            self._cells[seq] = bigger
