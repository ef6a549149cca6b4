"""What a steady step costs does not grow with the cells or with the vocabulary, and little with the slots."""

from __future__ import annotations

import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from localrun.engine.report import INTERVAL_S
from localrun.wire import KvRun
from tests.engine.hot_loop import HotLoop

SMALL, LARGE, HUGE = 1 << 13, 1 << 16, 1 << 20
# Calls of functions, of Python's and of C's, that each stream adds to a step with its message.
CALLS_PER_SLOT = 52


def loop_over(n_cells: int, n_slots: int, *, is_split: bool, clock: Callable[[], float] = lambda: 0.0) -> HotLoop:
    """With prompts that take half of the cells. While the clock stands still there is no map of the cells."""
    loop = HotLoop(
        n_slots, is_split=is_split, n_cells=n_cells, n_prompt=n_cells // 2 // n_slots, n_batch=1 << 16, clock=clock
    )
    loop.backend.n_vocab = n_cells
    return loop


def n_calls(work: Callable[[], None]) -> int:
    """Calls that this thread makes meanwhile."""
    count = 0

    def note(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(n_cells: int, n_slots: int, *, is_split: bool) -> int:
    loop = loop_over(n_cells, n_slots, is_split=is_split)
    return int(statistics.median(n_calls(loop.step) for _ in range(20)))


@pytest.mark.parametrize("is_split", [False, True])
def test_a_step_makes_as_many_calls_whatever_the_size_of_cache_and_vocabulary(is_split: bool):
    small, large = (calls_of_a_step(n_cells, 4, is_split=is_split) for n_cells in (SMALL, LARGE))
    assert large <= 1.02 * small  # looking for drafts takes a call more or less


@pytest.mark.parametrize("is_split", [False, True])
def test_another_stream_adds_few_calls_to_a_step(is_split: bool):
    few, many = (calls_of_a_step(LARGE, n_slots, is_split=is_split) for n_slots in (4, 36))
    assert many - few <= 32 * CALLS_PER_SLOT


@pytest.mark.parametrize("is_split", [False, True])
def test_a_step_makes_no_array_of_the_size_of_cache_or_vocabulary(is_split: bool):
    loop = loop_over(LARGE, 4, is_split=is_split)
    most = []
    tracemalloc.start()
    try:
        for _ in range(20):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            loop.step()
            most.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert statistics.median(most) < LARGE // 8


@pytest.mark.parametrize("is_split", [False, True])
def test_a_step_looks_through_nothing_of_the_size_of_cache_or_vocabulary(is_split: bool):
    """A pass over a million cells would take several times as long as everything else together."""
    small, huge = (
        statistics.median(loop_over(n_cells, 4, is_split=is_split).times_s(200, time.thread_time))
        for n_cells in (SMALL, HUGE)
    )
    assert huge < 3 * small


def test_the_map_of_the_cells_is_drawn_by_somebody_else_from_a_copy():
    """While it is drawn, steps go on, and change the books; the first message after it takes it along."""
    handed_over: list[Callable[[], list[KvRun]]] = []
    drawn: list[list[KvRun]] = []

    def beside(work: Callable[[], list[KvRun]]) -> Callable[[], list[KvRun] | None]:
        handed_over.append(work)
        return lambda: drawn[-1] if len(drawn) == len(handed_over) else None

    now_s = 0.0
    loop = HotLoop(3, is_split=False, n_cells=1024, n_prompt=20, clock=lambda: now_s, beside=beside)
    drawn += [work() for work in handed_over]
    loop.step()
    now_s += INTERVAL_S
    n_held = sum(request.n_computed for request in loop.engine.scheduler.running)
    n_before = len(handed_over)
    for _ in range(5):
        step = loop.engine.step()
        assert step is not None
        assert step.kv_map is None, "nobody has drawn one yet"
    assert len(handed_over) == n_before + 1, "one at a time"
    thread = threading.Thread(target=lambda: drawn.append(handed_over[-1]()))
    thread.start()
    thread.join()
    step = loop.engine.step()
    assert step is not None
    assert step.kv_map is not None
    assert sum(run.n_cells for run in step.kv_map) == n_held, "of the moment when it was begun"
    following = loop.engine.step()
    assert following is not None
    assert following.kv_map is None, "it is sent once"
