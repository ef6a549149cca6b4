"""The mirror of the KV pool against llama.cpp's placement rule, written out cell by cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from localrun.engine.cache.cells import PoolCells, StreamCells
from tests.depth import DEPTH

N_CELLS, N_SEQS = 24, 4
sequences = st.integers(0, N_SEQS - 1)


class Pool(RuleBasedStateMachine):
    """`owners[cell]` maps the sequences of a cell to nothing but their presence; `lists[seq]` has cells by position."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = PoolCells(N_CELLS, N_SEQS)
        self.lists: dict[int, list[int]] = {seq: [] for seq in range(N_SEQS)}
        self.head = 0

    def used(self) -> set[int]:
        return {cell for cells in self.lists.values() for cell in cells}

    def find(self, count: int) -> list[int] | None:
        """`llama_kv_cache::find_slot` for cells that need not be neighbours."""
        used, found, at = self.used(), [], self.head
        if at > len(used) + 2 * count:
            at = 0
        for _ in range(N_CELLS):
            at = 0 if at >= N_CELLS else at
            if at not in used:
                found.append(at)
            at += 1
            if len(found) == count:
                return found
        return None

    def free(self, cells: list[int]) -> None:
        freed = [cell for cell in cells if cell not in self.used()]
        self.head = min([self.head, *freed])

    @rule(rows=st.lists(sequences, min_size=1, max_size=N_CELLS))
    def place(self, rows: list[int]) -> None:
        found = self.find(len(rows))
        if found is None:
            with pytest.raises(ValueError, match="free"):
                self.cells.place(rows)
            return
        self.cells.place(rows)
        for cell, seq in zip(found, rows, strict=True):
            self.lists[seq].append(cell)
        self.head = found[-1] + 1

    @rule(seq=sequences, length=st.integers(0, N_CELLS))
    def truncate(self, seq: int, length: int) -> None:
        self.cells.truncate(seq, length)
        dropped, self.lists[seq] = self.lists[seq][length:], self.lists[seq][:length]
        self.free(dropped)

    @rule(source=sequences, taker=sequences, end=st.integers(0, N_CELLS))
    def share(self, source: int, taker: int, end: int) -> None:
        start = len(self.lists[taker])
        if source == taker or not start <= end <= len(self.lists[source]):
            return
        self.cells.share(source, taker, start, end)
        self.lists[taker] += self.lists[source][start:end]

    @rule(source=sequences, taker=sequences, start=st.integers(0, N_CELLS), end=st.integers(0, N_CELLS))
    def swap(self, source: int, taker: int, start: int, end: int) -> None:
        end = min(end, len(self.lists[source]), len(self.lists[taker]))
        if source == taker or start >= end:
            return
        self.cells.swap(source, taker, start, end)
        own = self.lists[taker][start:end]
        self.lists[taker][start:end] = self.lists[source][start:end]
        self.free(own)

    @rule(seq=sequences, start=st.integers(0, N_CELLS), end=st.integers(0, N_CELLS))
    def move(self, seq: int, start: int, end: int) -> None:
        own = self.lists[seq][start:end]
        holders = [other for other in range(N_SEQS) if own and self.lists[other][start:end] == own]
        if not own or any(self.cells.refs[cell] != len(holders) for cell in own):
            return
        for other in holders:
            del self.lists[other][start : start + len(own)]
        self.free(own)
        found = self.find(len(own))
        assert found is not None
        self.head = found[-1] + 1
        for other in holders:
            self.lists[other][start:start] = found
        self.cells.move(holders, start, start + len(own))

    @rule(seq=sequences, count=st.integers(0, N_CELLS))
    def fill(self, seq: int, count: int) -> None:
        found = self.find(count) if count else []
        n_tokens = len(self.lists[seq]) + count
        if found is None:
            with pytest.raises(ValueError, match="free"):
                self.cells.fill(seq, n_tokens)
            return
        self.cells.fill(seq, n_tokens)
        self.lists[seq] += found
        self.head = found[-1] + 1 if found else self.head
        if n_tokens:
            with pytest.raises(ValueError, match="already"):
                self.cells.fill(seq, n_tokens - 1)

    @invariant()
    def agrees(self) -> None:
        self.cells.check_integrity()
        used = self.used()
        holders = [sum(cell in cells for cells in self.lists.values()) for cell in range(N_CELLS)]
        assert {seq: self.cells.cells_of(seq).tolist() for seq in range(N_SEQS)} == self.lists
        assert self.cells.refs.tolist() == holders
        assert self.cells.n_used == len(used)
        assert self.cells.n_free == N_CELLS - len(used)
        assert self.cells.n_shared == sum(count > 1 for count in holders)
        assert self.cells.span == max(used, default=-1) + 1


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=50 * DEPTH, stateful_step_count=30)


def test_a_share_that_would_leave_a_hole_or_go_past_the_end_is_refused():
    cells = PoolCells(64, 3)
    cells.place([0] * 10 + [1] * 4)
    for start, end in ((0, 5), (5, 6), (4, 11)):
        with pytest.raises(ValueError, match="lengths do not fit"):
            cells.share(0, 1, start, end)


def test_what_is_held_alike_ends_with_the_cell_and_begins_where_the_sharing_changes():
    cells = PoolCells(64, 4)
    cells.place([0] * 20)
    cells.share(0, 1, 0, 12)
    cells.share(0, 2, 0, 5)
    cells.place([1] * 3)
    assert cells.held_alike(3, 99) == ([0, 1, 2], 0, 4)
    assert cells.held_alike(11, 99) == ([0, 1], 5, 12)
    assert cells.held_alike(11, 4) == ([0, 1], 8, 12)
    assert cells.held_alike(22, 99) == ([1], 12, 15)


class Looks(np.ndarray):
    """Reference counts that know how many of them were looked at."""

    n_seen = 0

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        Looks.n_seen += np.size(part)
        return part


def test_a_step_looks_at_few_cells_however_many_there_are():
    """Full but for a hole in the middle, where streams take and give back cells."""
    n_cells, n_seqs = 1 << 18, 8
    cells = PoolCells(n_cells, n_seqs + 2)
    cells.place([n_seqs] * (n_cells // 2))
    cells.place([n_seqs + 1] * (n_cells // 2))
    cells.truncate(n_seqs + 1, n_cells // 2 - 2_000)
    cells.truncate(n_seqs, n_cells // 2 - 2_000)
    cells.refs = cells.refs.view(Looks)
    Looks.n_seen = 0
    n_steps = 100
    for step in range(n_steps):
        cells.place(list(range(n_seqs)) * 4)
        assert cells.n_shared == 0
        cells.truncate(step % n_seqs, 0)
    assert Looks.n_seen < n_steps * 4_000


def test_a_sequence_may_grow_to_the_whole_pool():
    cells = PoolCells(2048, 2)
    for _ in range(4):
        cells.place([1] * 512)
    assert cells.cells_of(1).tolist() == list(range(2048))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cells: cells.refs.__setitem__(3, 2),
        lambda cells: setattr(cells, "n_used", 4),
        lambda cells: setattr(cells, "span", 9),
        lambda cells: setattr(cells, "n_shared", 1),
        lambda cells: cells.cells_of(0).__setitem__(1, 0),
    ],
)
def test_the_check_notices_books_that_are_wrong(spoil):
    cells = PoolCells(16, 2)
    cells.place([0] * 5)
    cells.check_integrity()
    spoil(cells)
    with pytest.raises(AssertionError):
        cells.check_integrity()


def test_the_check_notices_a_cell_that_is_listed_twice_and_counted_once():
    cells = PoolCells(16, 2)
    cells.place([0] * 5)
    cells.cells_of(0)[4] = 0
    cells.refs[4], cells.n_used, cells.span = 0, 4, 4
    with pytest.raises(AssertionError, match="twice"):
        cells.check_integrity()


def test_streams_count_for_themselves_and_the_longest_decides_the_span():
    cells = StreamCells(300, n_seqs=3, n_away=1)
    cells.place([0, 0, 2, 0])
    cells.fill(1, 7)
    assert [cells.length(seq) for seq in range(4)] == [3, 7, 1, 0]
    assert (cells.n_used, cells.span, cells.n_free) == (11, 7, 93)


def test_prompts_in_the_making_use_cells_but_do_not_lengthen_the_span_of_the_streams():
    cells = StreamCells(200, n_seqs=2, n_away=2)
    cells.fill(0, 10)
    cells.fill(3, 90)
    assert (cells.n_used, cells.span, cells.n_free) == (100, 10, 90)


def test_a_stream_that_ends_gives_everything_back():
    cells = StreamCells(200, n_seqs=2, n_away=0)
    cells.place([1] * 40)
    with pytest.raises(ValueError, match="already"):
        cells.fill(1, 3)
    cells.truncate(1, 0)
    assert (cells.n_used, cells.span, cells.n_free, cells.n_shared) == (0, 0, 100, 0)
