from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.cache.cells import PoolCells, StreamCells
from localrun.engine.report import INTERVAL_S, KEPT, MAX_RUNS, MapBooks, kv_map
from localrun.wire import KvRun
from tests.engine.harness import Harness


def test_shared_cells_are_runs_of_their_own():
    cells = PoolCells(32, 4)
    cells.place([0] * 6)
    cells.share(0, 1, 0, 4)
    cells.place([1] * 2)
    assert kv_map(MapBooks.of(cells, 4), {1: 7}) == [
        KvRun(0, 4, 7, True),
        KvRun(4, 2, KEPT, False),
        KvRun(6, 2, 7, False),
    ]


def test_streams_lie_one_after_the_other():
    cells = StreamCells(32, 2, 1)
    cells.fill(1, 5)
    cells.fill(2, 3)
    assert kv_map(MapBooks.of(cells, 3), {2: 9}) == [KvRun(16, 5, KEPT, False), KvRun(32, 3, 9, False)]


@given(st.lists(st.integers(0, 3), max_size=300), st.sets(st.integers(0, 3)))
def test_every_used_cell_is_in_one_run(rows: list[int], freed: set[int]):
    cells = PoolCells(300, 4)
    cells.place(rows)
    for seq in freed:
        cells.truncate(seq, 0)
    runs = kv_map(MapBooks.of(cells, 4), {})
    assert sum(run.n_cells for run in runs) == cells.n_used
    covered = np.zeros(300, bool)
    for run in runs:
        assert not covered[run.start : run.start + run.n_cells].any()
        covered[run.start : run.start + run.n_cells] = True
    assert (covered == (cells.refs > 0)).all()


@pytest.mark.parametrize("n_seqs", [2, 3, 32, 64, 200])
def test_a_map_of_confetti_is_drawn_coarser_and_counts_everybodys_cells(n_seqs: int, monkeypatch: pytest.MonkeyPatch):
    """Streams that decode in lockstep lie cell by cell beside each other, behind a prompt that some of them share."""
    n_prompt, n_steps = 400, 12_000 // n_seqs
    cells = PoolCells(16_000, n_seqs)
    cells.place([0] * n_prompt)
    cells.share(0, 1, 0, n_prompt)
    cells.place(list(range(n_seqs)) * n_steps)
    cells.truncate(n_seqs - 1, 0)
    n_made = 0

    def counted(*fields: Any) -> KvRun:
        nonlocal n_made
        n_made += 1
        return KvRun(*fields)

    monkeypatch.setattr("localrun.engine.report.KvRun", counted)
    runs = kv_map(MapBooks.of(cells, n_seqs), {seq: 100 + seq for seq in range(n_seqs)})
    assert n_made == len(runs) <= MAX_RUNS, "none is made to be thrown away"
    held: Counter[tuple[int, bool]] = Counter()
    for run in runs:
        held[run.request_id, run.is_shared] += run.n_cells
    alone = {(100 + seq, False): n_steps for seq in range(n_seqs - 1)}
    if n_seqs == 2:  # the one that shared it is gone
        assert held == {(100, False): n_prompt + n_steps}
    else:
        assert held == {**alone, (101, True): n_prompt}
    ends = [run.start + run.n_cells for run in runs]
    assert all(end <= run.start for end, run in zip(ends, runs[1:], strict=False))
    assert ends[-1] <= cells.span


def test_a_coarse_map_is_right_about_where_a_request_lies():
    n_steps = 4_000
    cells = PoolCells(4 * n_steps, 4)
    for pair in ([0, 1], [2, 3]):
        cells.place(pair * n_steps)
    runs = kv_map(MapBooks.of(cells, 4), {seq: seq + 1 for seq in range(4)})
    assert len(runs) > 100
    for run in runs:
        first = 0 if run.request_id <= 2 else 2 * n_steps
        assert first <= run.start < run.start + run.n_cells <= first + 2 * n_steps


@pytest.mark.parametrize("is_split", [False, True])
def test_the_engine_tells_who_holds_its_cells_now_and_then_and_at_the_end(is_split: bool):
    engine = Harness(n_cells=512, n_slots=2, is_split=is_split)
    engine.submit(1, "a prompt of one", n_predict=200)
    engine.submit(2, "another prompt", n_predict=40)
    engine.run()
    maps = [step for step in engine.steps if step.kv_map is not None]
    assert len(maps) > 2
    assert len(maps) < len(engine.steps) / 4, f"one in {INTERVAL_S} s is enough"
    holders = {run.request_id for step in maps for run in step.kv_map or ()}
    assert {1, 2} <= holders
    last = maps[-1]
    assert last.kv_map is not None
    assert {run.request_id for run in last.kv_map} <= {KEPT}, "nobody runs at the end"
    assert sum(run.n_cells for run in last.kv_map) == last.stats.kv_cells_used
