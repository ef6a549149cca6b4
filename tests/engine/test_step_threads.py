"""How many threads a step gets, over made machines: a function from threads to seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localrun.engine.step_threads import FIRST_PAUSE, LONGEST_PAUSE, TRIAL_STEPS, StepThreads

Machine = Callable[[int], float]


def run(threads: StepThreads, machine: Machine, n_steps: int, *, n_rows: int = 1) -> list[int]:
    """The numbers of threads of so many steps."""
    used = []
    for _ in range(n_steps):
        used.append(threads.choose(n_rows))
        threads.note(n_rows, machine(used[-1]))
    return used


def quiet(n_threads: int) -> float:
    """Twice the threads, half the time."""
    return 0.010 / n_threads


def contended(n_threads: int) -> float:
    """Every thread more is one more that others keep from its processor."""
    return 0.010 * n_threads


def test_a_machine_that_gains_by_threads_keeps_all_of_them():
    used = run(StepThreads(8), quiet, 20 * LONGEST_PAUSE)
    assert used[-1] == 8
    assert used.count(8) > 0.97 * len(used)


@pytest.mark.parametrize("most", [2, 3, 8, 12])
def test_a_machine_where_one_is_quickest_gets_there_step_by_step(most: int):
    used = run(StepThreads(most), contended, 40 * FIRST_PAUSE)
    assert used[-1] == 1
    assert max(used) == most


def test_the_middle_is_found_from_above():
    used = run(StepThreads(16), lambda n: abs(n - 4) * 0.001 + 0.005, 40 * FIRST_PAUSE)
    assert used[-1] == 4


def test_other_programs_that_come_are_noticed_soon_and_when_they_go_too():
    threads = StepThreads(2)
    run(threads, quiet, 20 * LONGEST_PAUSE)
    assert run(threads, contended, 3 * FIRST_PAUSE)[-1] == 1
    run(threads, contended, 20 * LONGEST_PAUSE)
    assert run(threads, quiet, 2 * LONGEST_PAUSE)[-1] == 2


def test_kinds_of_steps_are_apart():
    threads = StepThreads(2)
    for _ in range(4 * FIRST_PAUSE):
        run(threads, contended, 1, n_rows=1)
        run(threads, quiet, 1, n_rows=8)
    assert threads.choose(1) == 1
    assert threads.choose(8) == 2
    assert threads.choose(5) == 2


def test_a_hopeless_trial_is_one_step():
    used = run(StepThreads(2), lambda n: 0.010 if n == 2 else 0.050, 4 * FIRST_PAUSE)
    trials = "".join("t" if n == 1 else "." for n in used)
    assert "t" in trials
    assert "tt" not in trials


def test_a_close_call_changes_nothing():
    used = run(StepThreads(2), lambda n: 0.010 if n == 2 else 0.0098, 40 * FIRST_PAUSE)
    assert used[-1] == 2


def test_one_slow_step_is_no_reason():
    threads = StepThreads(2)
    run(threads, quiet, 20 * LONGEST_PAUSE)
    threads.choose(1)
    threads.note(1, 1.0)
    assert set(run(threads, quiet, TRIAL_STEPS)) == {2}


def test_a_single_processor_has_no_choice():
    assert set(run(StepThreads(1), quiet, 2 * LONGEST_PAUSE)) == {1}
