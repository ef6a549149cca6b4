"""Where sequences lie in cells: the three layouts, each with its book of cells and the native calls that change it.

Owner: the engine's main thread. A layout changes its book and the backend's cells in one call, so the two never differ:

* `OnePool`: every row attends over the used span of one pool, including empty cells and those of other sequences.
  Prompts share their common prefixes: a cell may belong to several sequences.
* `Streams`: each sequence has its own stream of cells, and its rows attend only over that. Common prefixes are copied.
  Sequences in the background, and those that are longer than a stream, share a pool.
* `WholeStates`: one pool whose sequences can be neither cut nor shared (sliding windows, recurrent and hybrid layers).

Does not: know which tokens lie there (`tree.py`), or decide anything (`cache.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Backend, MediaChunk, State

# A span this much longer than the used cells is worth a move: the moves take as long as a few steps lose by it.
COMPACT_RATIO, COMPACT_CELLS = 1.5, 1024
# One move, for which streams wait; less than the holes have room for.
MOVE_TOKENS = 512
_GROW = 256

Piece = tuple[State, int, int, int]
Chunks = tuple[tuple[int, MediaChunk], ...]


class Layout:
    """The base of all layouts: a book of `cells`, of which some are a `pool` that sequences from `first_pooled` on
    share, and the calls that change sequences.

    Sequences from `n_main` up to `n_seqs` are in the pool beside the streams. `can_cut`: a part of a sequence can be
    removed, saved and restored. `can_share`: all sequences share cells; otherwise common prefixes are copied.
    """

    can_cut = True
    can_share = False

    def __init__(self, backend: Backend, book: StreamCells | None = None, n_away: int = 0) -> None:
        self.pool = PoolCells(backend.n_cells, backend.n_seqs) if book is None else book.pool
        self.cells: Cells = self.pool if book is None else book
        self.n_main = backend.n_seqs
        self.first_pooled = self.n_main if n_away else 0
        self.n_seqs = backend.n_seqs + n_away
        self._backend = backend
        self._chunks: dict[int, Chunks] = {}  # of sequences that have any

    def set_chunks(self, seq: int, chunks: Chunks) -> None:
        """A sequence is used for a prompt with these chunks of media from now on."""
        if chunks or seq in self._chunks:
            self._backend.set_chunks(seq, chunks)
            self._chunks[seq] = chunks
            if not chunks:
                del self._chunks[seq]

    def lend_chunks(self, seq: int, target: int) -> None:
        """What a sequence holds is about to be in `target`, too."""
        self.set_chunks(target, self._chunks.get(seq, ()))

    def cut(self, seq: int, n_tokens: int) -> bool:
        """Keep the first `n_tokens` of a sequence. False, with nothing changed, if the memory type refuses that."""
        if not self._backend.seq_remove(seq, n_tokens):
            return False
        self.cells.truncate(seq, n_tokens)
        return True

    def give(self, source: int, target: int, n_tokens: int) -> bool:
        """Give an empty sequence the first tokens of another one. False if that is impossible."""
        return False

    def spare_of(self, seq: int, free: Collection[int]) -> int | None:
        """An empty sequence, `free` or not, that copies of this one pass through if it is in a pool."""
        return None

    def save(self, seq: int, ranges: list[tuple[int, int]], spare: int | None) -> Generator[State]:
        """The bytes of each range of positions; each range begins where the previous one ends. Exhaust or close the
        generator before any other call. `spare` is an empty sequence of the same pool, if there is one: the library
        saves whole sequences, and one that shares only the ranges limits the copy to them."""
        if spare is None or not ranges:
            yield from self._backend.state_slices(seq, ranges)
            return
        self._lend(seq, spare, ranges[0][0], ranges[-1][1])
        try:
            yield from self._backend.state_slices(spare, ranges)
        finally:
            self._take_back(spare)

    def load(self, seq: int, pieces: list[Piece], spare: int | None) -> bool:
        """Append pieces to a sequence. False, with nothing changed, if they were refused. The library replaces a whole
        sequence, so pieces are appended through `spare`, an empty sequence of the same pool. Without it `seq` itself
        must be empty."""
        start, end = pieces[0][2], pieces[-1][3]
        if start == 0:
            if not self._backend.state_set(seq, self._backend.state_join(seq, pieces)):
                return False
            self.cells.fill(seq, end)
            return True
        assert spare is not None
        self.lend_chunks(seq, spare)
        is_set = self._backend.state_set(spare, self._backend.state_join(spare, pieces))
        if is_set:
            self._backend.seq_share(spare, seq, start, end)
            self.cells.fill(seq, end)
        self._take_back(spare)
        return is_set

    def _lend(self, seq: int, spare: int, start: int, end: int) -> None:
        """Let an empty sequence have a part of another one, which no book notes."""
        self.lend_chunks(seq, spare)
        self._backend.seq_share(seq, spare, start, end)

    def _take_back(self, spare: int) -> None:
        self._backend.seq_remove(spare, 0)
        self.set_chunks(spare, ())

    @property
    def is_loose(self) -> bool:
        """Whether the span of the pool is so much longer than its used cells that `tighten` pays."""
        return self.pool.span > COMPACT_RATIO * self.pool.n_used + COMPACT_CELLS

    def tighten(self, spare: int) -> None:
        """Move the highest cell of the pool, and what precedes it in the same sequences, into the lowest free cells.
        Sequences keep their numbers and what they share. `spare` is an empty sequence there."""
        cells, backend = self.pool, self._backend
        pooled, start, end = cells.held_alike(cells.span - 1, MOVE_TOKENS)
        seqs = [self.first_pooled + seq for seq in pooled]
        for first, chunk in self._chunks.get(seqs[0], ()):
            if first < end and start < first + chunk.n_tokens:
                start, end = min(start, first), max(end, first + chunk.n_tokens)
        if end > self.cells.length(seqs[0]):
            return  # in the middle of a chunk, which moves as a whole: later
        self._lend(seqs[0], spare, start, end)
        (data,) = backend.state_slices(spare, [(start, end)])
        for seq in (spare, *seqs):
            backend.seq_remove(seq, start, end)
        if not backend.state_set(spare, backend.state_join(spare, [(data, start, start, end)])):
            raise RuntimeError(f"positions [{start}, {end}) were refused by the cells that they came from")
        for seq in seqs:
            backend.seq_share(spare, seq, start, end)
        self._take_back(spare)
        cells.move(pooled, start, end)


class OnePool(Layout):
    can_share = True

    def spare_of(self, seq: int, free: Collection[int]) -> int | None:
        return min(free, default=None)

    def give(self, source: int, target: int, n_tokens: int) -> bool:
        self._backend.seq_share(source, target, 0, n_tokens)
        self.pool.share(source, target, 0, n_tokens)
        return True

    def same(self, holder: int, seq: int, start: int, end: int) -> None:
        """`seq` has the same tokens as `holder` at [start, end): it gives up its own cells there and shares."""
        if self.pool.cells_of(seq)[start] == self.pool.cells_of(holder)[start]:
            return  # already the same cells
        if self._backend.seq_remove(seq, start, end):
            self._backend.seq_share(holder, seq, start, end)
            self.pool.swap(holder, seq, start, end)


class Streams(Layout):
    """See the module. The library computes neighbouring streams together and needs another pass for every gap between
    them, so running sequences are kept at the lowest numbers."""

    def __init__(self, backend: Backend) -> None:
        n_away = backend.worker.n_seqs if backend.worker else 0
        self.book = StreamCells(backend.n_cells, backend.n_seqs, n_away)
        super().__init__(backend, self.book, n_away)

    def spare_of(self, seq: int, free: Collection[int] = ()) -> int | None:
        return self._backend.pool_spare if seq >= self.n_main else None

    def give(self, source: int, target: int, n_tokens: int) -> bool:
        spare = self.spare_of(source)
        if spare is not None and target >= self.n_main:
            self._backend.seq_share(source, target, 0, n_tokens)
            self.book.share(source, target, n_tokens)
            return True
        if spare is not None:  # of which a part can be copied: more would not fit
            self._lend(source, spare, 0, n_tokens)
        own_chunks = self._chunks.get(target, ())
        self.lend_chunks(source, target)  # a stream is copied as a whole, with what the target's prompt lacks
        is_copied = self._backend.seq_copy(source if spare is None else spare, target)
        if is_copied:
            self.cells.fill(target, self.cells.length(source) if spare is None else n_tokens)
        if spare is not None:
            self._take_back(spare)
        is_given = is_copied and self.cut(target, n_tokens)
        self.set_chunks(target, own_chunks)
        return is_given

    def move(self, seq: int, target: int) -> None:
        """Move a sequence to an empty stream."""
        n_tokens = self.cells.length(seq)
        self.lend_chunks(seq, target)
        if n_tokens:
            if not self._backend.seq_copy(seq, target):
                raise RuntimeError(f"stream {target} refused the state of stream {seq}")
            self.cells.fill(target, n_tokens)
        self.cut(seq, 0)


class WholeStates(Layout):
    can_cut = False

    def load_whole(self, seq: int, data: State, n_tokens: int) -> bool:
        """Fill an empty sequence with a state of `n_tokens`. False if it was refused; the sequence is then empty."""
        if not self._backend.state_set(seq, data if isinstance(data, bytearray) else bytearray(data)):
            return False
        self.cells.fill(seq, n_tokens)
        return True


class PoolCells:
    """A mirror of llama.cpp's one pool: which sequence holds which cell. `n_cells` cells, all empty at first. One
    request may use all of them.

    llama.cpp does not say where it puts tokens, but new tokens and those of a restored state always take the lowest
    free cells. (`llama_kv_cache::find_slot` scans upwards from a head. Placing moves the head behind the last cell
    taken and freeing moves it back to the first cell freed, so no free cell is ever below it; its rules for wrapping
    round and for starting over at 0 never apply.) So the placement follows from which cells are in use, whatever
    happened before, and a step that failed half way leaves nothing to catch up with. Following it here gives the exact
    number of free cells before a step, the cells that are shared, and the used span, which is what attention costs.

    Invariant: `refs[cell]` is the number of sequences that list the cell; positions of a sequence are 0..length-1;
    `span` is one more than the highest used cell, 0 when all are empty: every row attends over this many cells, used or
    not. `n_shared` cells have more than one sequence. `n_placed` counts the rows of all steps so far.
    """

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
        """Append one token to the sequence of each row, in order. Raises ValueError if `rows` are more than
        `n_free`."""
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
        """The sequences that hold a used cell, and at most `most` positions [start, end) that exactly these share, of
        which the cell is the last.

        Sequences share prefixes, so deeper positions have fewer holders. O(cells of all sequences).
        """
        seqs = [seq for seq in range(len(self._lengths)) if cell in self.cells_of(seq)]
        cells = self.cells_of(seqs[0])
        end = int(np.flatnonzero(cells == cell)[0]) + 1
        start = int(np.flatnonzero(self.refs[cells[:end]] == len(seqs))[0])
        return seqs, max(start, end - most), end

    def move(self, seqs: list[int], start: int, end: int) -> None:
        """Sequences that share their cells at [start, end) with no others give them up, and together take the lowest
        free ones."""
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

    def fill(self, seq: int, n_tokens: int) -> None:
        """A sequence has so many tokens now; the new ones take the lowest free cells, in order."""
        length = self._lengths[seq]
        if n_tokens < length:
            raise ValueError(f"sequence {seq} has {length} tokens already")
        taken = self._take(n_tokens - length)
        self._reserve(seq, n_tokens)
        self._cells[seq][length:n_tokens] = taken
        self._lengths[seq] = n_tokens

    def check_integrity(self) -> None:
        """Raises AssertionError if the reference counts do not follow from the sequences. O(cells)."""
        refs = np.zeros(self.n_cells, np.int32)
        for seq, length in enumerate(self._lengths):
            if length:
                refs[self.cells_of(seq)] += 1  # a cell that is listed twice counts once
        assert refs.sum() == sum(self._lengths), "a sequence lists a cell twice"
        assert np.array_equal(refs, self.refs), "reference counts differ from what the sequences hold"
        assert self.n_shared == np.count_nonzero(refs > 1), "n_shared differs from the cells that several hold"
        used = np.flatnonzero(refs)
        assert used.size == self.n_used, "n_used differs from the cells in use"
        assert self.span == (used[-1] + 1 if used.size else 0), "span is not the end of the used cells"
        assert refs[: self._n_packed].all(), "a free cell where none should be"

    def _take(self, count: int) -> NDArray[np.int32]:
        """Take `count` free cells, with one reference each: those that llama.cpp would choose, in its order."""
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
        """Add a holder to used cells."""
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
        """Shrink the span to end at a used cell again. O(free cells at its end)."""
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


class StreamCells:
    """How many tokens each stream of a split KV cache holds; where they are in the stream does not matter. A stream
    belongs to one sequence. There are `n_seqs` streams, which divide `n_total` cells, and a `pool` of as many for the
    `n_away` sequences behind them. All are empty at first.

    Of the streams: `n_cells` of each, which one request may use, `n_free` in the fullest, and its `span`, for they are
    computed together, each as long as the longest. Else as `PoolCells`."""

    def __init__(self, n_total: int, n_seqs: int, n_away: int) -> None:
        self.n_cells = n_total // n_seqs
        self.n_placed = 0
        self.n_seqs = n_seqs
        self.pool = PoolCells(n_total, n_away)
        self._lengths = [0] * n_seqs

    @property
    def n_used(self) -> int:
        """Cells in use, in all streams and in the pool."""
        return sum(self._lengths) + self.pool.n_used

    @property
    def n_shared(self) -> int:
        return self.pool.n_shared

    @property
    def n_free(self) -> int:
        return self.n_cells - self.span

    @property
    def span(self) -> int:
        return max(self._lengths)

    def length(self, seq: int) -> int:
        return self._lengths[seq] if seq < self.n_seqs else self.pool.length(seq - self.n_seqs)

    def place(self, rows: list[int]) -> None:
        """Append one token to the sequence of each row: all are streams', or all are in the pool."""
        self.n_placed += len(rows)
        if rows and rows[0] >= self.n_seqs:
            self.pool.place([seq - self.n_seqs for seq in rows])
            return
        for seq in rows:
            self._lengths[seq] += 1

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """An empty sequence of the pool takes the first cells of another one there."""
        self.pool.share(source - self.n_seqs, target - self.n_seqs, 0, n_tokens)

    def truncate(self, seq: int, length: int) -> None:
        if seq >= self.n_seqs:
            self.pool.truncate(seq - self.n_seqs, length)
        else:
            self._lengths[seq] = min(length, self._lengths[seq])

    def fill(self, seq: int, n_tokens: int) -> None:
        if seq >= self.n_seqs:
            self.pool.fill(seq - self.n_seqs, n_tokens)
            return
        if n_tokens < self._lengths[seq]:
            raise ValueError(f"sequence {seq} has {self._lengths[seq]} tokens already")
        self._lengths[seq] = n_tokens


# How full the backend's cells are.
Cells = PoolCells | StreamCells
