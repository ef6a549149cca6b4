"""A mirror of llama.cpp's unified KV pool: which sequence holds which cell. Pure.

llama.cpp does not tell where it puts tokens, but new tokens, and those of a restored state, always take the lowest free
cells. (`llama_kv_cache::find_slot` scans upwards from a head. Placing moves the head behind the last cell taken and
freeing moves it back to the first cell freed, so no free cell is ever below it; its rules for wrapping round and for
starting over at 0 never apply.) So the placement follows from which cells are in use, whatever happened before, and a
step that failed half way leaves nothing to catch up with. Following it here gives the exact number of free cells before
a step, the cells that sequences share, and the used span, which is what attention costs.

Invariant: `refs[cell]` is the number of sequences that list the cell; positions of a sequence are 0..length-1; `span`
is one more than the highest used cell, 0 when all are empty: every row attends over this many cells, used or not.
`n_shared` cells have more than one sequence. `n_placed` counts the rows of all steps so far.
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
        self.n_shared = 0
        self.n_placed = 0
        self.span = 0
        self._n_packed = 0  # no free cell is below this one
        self._cells: list[NDArray[np.int32]] = [np.empty(_GROW, np.int32) for _ in range(n_seqs)]
        self._lengths = [0] * n_seqs

    @property
    def n_free(self) -> int:
        return self.n_cells - self.n_used

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._lengths[seq]

    def cells_of(self, seq: int) -> NDArray[np.int32]:
        """The cells of a sequence in order of position. A view: do not keep it."""
        return self._cells[seq][: self._lengths[seq]]

    def place(self, rows: list[int]) -> None:
        """Append one token to the sequence of each row, in order. Raises ValueError when `rows` are more than free."""
        taken = self._take(len(rows))
        numbers, at = taken.tolist(), 0
        while at < len(rows):
            seq, end = rows[at], at + 1
            while end < len(rows) and rows[end] == seq:
                end += 1
            length = self._lengths[seq]
            self._lengths[seq] = length + end - at
            if self._lengths[seq] > self._cells[seq].size:
                self._reserve(seq, self._lengths[seq])
            if end - at == 1:
                self._cells[seq][length] = numbers[at]
            else:
                self._cells[seq][length : length + end - at] = taken[at:end]
            at = end
        self.n_placed += len(rows)

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """`target`, which holds exactly [0, start), also takes the cells of `source` at [start, end)."""
        if self._lengths[target] != start or end > self._lengths[source]:
            raise ValueError(f"cannot share [{start}, {end}) of {source} with {target}: lengths do not fit")
        cells = self._cells[source][start:end]
        self._reserve(target, end)
        self._cells[target][start:end] = cells
        self._lengths[target] = end
        self._add(cells)

    def swap(self, source: int, target: int, start: int, end: int) -> None:
        """`target` gives up its own cells at [start, end) and takes those of `source`."""
        own = self._cells[target][start:end].copy()
        cells = self._cells[source][start:end]
        self._add(cells)
        self._cells[target][start:end] = cells
        self._drop(own)

    def held_alike(self, cell: int, most: int) -> tuple[list[int], int, int]:
        """The sequences that hold a used cell, and at most `most` positions [start, end) that just these share, of
        which the cell is the last.

        A sequence shares a beginning, so the deeper a position is, the fewer hold its cell. O(cells of all sequences).
        """
        seqs = [seq for seq in range(len(self._lengths)) if cell in self.cells_of(seq)]
        cells = self.cells_of(seqs[0])
        end = int(np.flatnonzero(cells == cell)[0]) + 1
        start = int(np.flatnonzero(self.refs[cells[:end]] == len(seqs))[0])
        return seqs, max(start, end - most), end

    def move(self, seqs: list[int], start: int, end: int) -> None:
        """Sequences that share their cells at [start, end) with nobody else give them up and take the lowest free ones
        together."""
        for seq in seqs:
            self._drop(self._cells[seq][start:end])
        taken = self._take(end - start)
        for seq in seqs:
            self._cells[seq][start:end] = taken
        for _ in seqs[1:]:
            self._add(taken)

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        dropped = self._cells[seq][length : self._lengths[seq]].copy()
        self._lengths[seq] = min(length, self._lengths[seq])
        self._drop(dropped)

    def saved_order(self, seq: int) -> NDArray[np.int32]:
        """Positions of a sequence in the order in which llama.cpp saves them, which is that of their cells."""
        return np.argsort(self.cells_of(seq)).astype(np.int32)

    def restore(self, seq: int, saved_order: NDArray[np.int32]) -> None:
        """An empty sequence comes back from a saved state, whose tokens take free cells in the order of the save."""
        if self._lengths[seq]:
            raise ValueError(f"sequence {seq} is not empty")
        taken = self._take(saved_order.size)
        self._reserve(seq, saved_order.size)
        self._cells[seq][saved_order] = taken
        self._lengths[seq] = saved_order.size

    def check_integrity(self) -> None:
        """Raises AssertionError if the reference counts do not follow from the sequences. O(cells)."""
        refs = np.zeros(self.n_cells, np.int32)
        for seq in range(len(self._lengths)):
            cells = self.cells_of(seq)
            assert np.unique(cells).size == cells.size, f"sequence {seq} lists a cell twice"
            refs[cells] += 1
        assert np.array_equal(refs, self.refs), "reference counts differ from what the sequences hold"
        assert self.n_shared == np.count_nonzero(refs > 1), "n_shared differs from the cells that several hold"
        used = np.flatnonzero(refs)
        assert used.size == self.n_used, "n_used differs from the cells in use"
        assert self.span == (used[-1] + 1 if used.size else 0), "span is not the end of the used cells"
        assert refs[: self._n_packed].all(), "a free cell where none should be"

    def _take(self, count: int) -> NDArray[np.int32]:
        """Use `count` free cells, one reference each: those that llama.cpp would choose, in its order."""
        if count > self.n_free:
            raise ValueError(f"{count} cells wanted, {self.n_free} free")
        if count == 0:
            return np.empty(0, np.int32)
        parts, at, width = [], self._n_packed, max(count, _GROW)
        n_missing = count
        while n_missing:
            free = np.flatnonzero(self.refs[at : at + width] == 0)[:n_missing] + at
            parts.append(free)
            n_missing -= free.size
            at, width = at + width, width * 2
        taken = np.concatenate(parts).astype(np.int32)
        self.refs[taken] = 1
        self.n_used += count
        self._n_packed = int(taken[-1]) + 1
        self.span = max(self.span, self._n_packed)
        return taken

    def _add(self, cells: NDArray[np.int32]) -> None:
        """Used cells have one more holder."""
        self.n_shared += int(np.count_nonzero(self.refs[cells] == 1))
        self.refs[cells] += 1

    def _drop(self, cells: NDArray[np.int32]) -> None:
        self.refs[cells] -= 1
        left = self.refs[cells]
        self.n_shared -= int(np.count_nonzero(left == 1))
        freed = cells[left == 0]
        if freed.size:
            self.n_used -= int(freed.size)
            self._n_packed = min(self._n_packed, int(freed.min()))
            self._shrink()

    def _shrink(self) -> None:
        """Let the span end with a used cell again. O(free cells at its end)."""
        width = _GROW
        while self.span:
            begin = max(0, self.span - width)
            used = np.flatnonzero(self.refs[begin : self.span])
            if used.size:
                self.span = begin + int(used[-1]) + 1
                return
            self.span, width = begin, width * 2

    def _reserve(self, seq: int, length: int) -> None:
        have = self._cells[seq].size
        if length > have:
            bigger = np.empty(max(length + _GROW, have * 2), np.int32)
            bigger[:have] = self._cells[seq]
            self._cells[seq] = bigger
