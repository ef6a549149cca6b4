"""How many threads a step gets, over made machines: a function from threads to seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from statistics import mode

import pytest

from localrun.engine.native.threads import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STALE_S,
    TRIAL_STEPS,
    WINDOW_S,
    Helpers,
    PromptThreads,
    StepThreads,
    Usage,
)

Machine = Callable[[int], float]


def run(
    threads: StepThreads, machine: Machine, n_steps: int, *, n_rows: int = 1, limit: int | None = None
) -> list[int]:
    """The numbers of threads of so many steps."""
    used = []
    for _ in range(n_steps):
        used.append(threads.choose(n_rows, limit))
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
    assert mode(used[-FIRST_PAUSE:]) == 1
    assert max(used) == most


def test_the_middle_is_found_from_above():
    used = run(StepThreads(16), lambda n: abs(n - 4) * 0.001 + 0.005, 40 * FIRST_PAUSE)
    assert mode(used[-FIRST_PAUSE:]) == 4


def test_other_programs_that_come_are_noticed_soon_and_when_they_go_too():
    threads = StepThreads(2)
    run(threads, quiet, 20 * LONGEST_PAUSE)
    assert run(threads, contended, 3 * FIRST_PAUSE)[-1] == 1
    run(threads, contended, 20 * LONGEST_PAUSE)
    assert run(threads, quiet, 2 * LONGEST_PAUSE)[-1] == 2


def test_others_that_go_are_noticed_by_steps_that_take_less():
    """One thread had to share its processor, too, so it gets quicker when it need not."""
    threads = StepThreads(2)
    assert run(threads, lambda n: 0.030 if n == 1 else 0.200, 20 * LONGEST_PAUSE)[-9:].count(1) >= 8
    assert mode(run(threads, quiet, 2 * FIRST_PAUSE)[-9:]) == 2


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


def test_one_slow_step_is_soon_forgotten():
    threads = StepThreads(2)
    run(threads, quiet, 20 * LONGEST_PAUSE)
    threads.choose(1)
    threads.note(1, 1.0)
    assert run(threads, quiet, 4 * FIRST_PAUSE)[2 * FIRST_PAUSE :].count(1) <= TRIAL_STEPS


def test_threads_that_must_be_woken_first_get_their_trial():
    """The first step with another number takes long, and is the only one."""
    threads, before = StepThreads(4), 4
    for _ in range(4 * FIRST_PAUSE):
        n_threads = threads.choose(1)
        threads.note(1, contended(n_threads) + (0.1 if n_threads != before else 0.0))
        before = n_threads
    assert threads.choose(1) < 4


def test_a_step_that_is_stuck_is_the_last_with_so_many_threads():
    threads = StepThreads(2)
    run(threads, quiet, 3)
    assert run(threads, lambda n: 3.0 if n == 2 else 0.012, 8 * LONGEST_PAUSE, limit=1).count(2) == 1
    assert run(threads, quiet, 2 * LONGEST_PAUSE, limit=2)[-1] == 2


def test_a_disturbance_that_made_fewer_threads_better_is_not_remembered_for_long():
    threads = StepThreads(2)
    run(threads, quiet, 20 * LONGEST_PAUSE)
    assert run(threads, lambda n: 0.012 if n == 1 else 0.060, 2 * FIRST_PAUSE)[-1] == 1
    assert mode(run(threads, quiet, 4 * FIRST_PAUSE)[-FIRST_PAUSE:]) == 2


def test_more_threads_than_are_to_be_had_are_not_begun_with():
    assert set(run(StepThreads(16), quiet, LONGEST_PAUSE, limit=5)) <= {2, 4}


def test_steps_that_began_with_fewer_get_the_others_once_they_are_to_be_had():
    threads = StepThreads(16)
    run(threads, quiet, FIRST_PAUSE // 2, limit=5)
    assert run(threads, quiet, 3, limit=16) == [16] * 3


def test_a_kind_that_follows_one_that_began_with_fewer_gets_them_too():
    threads = StepThreads(2)
    assert (threads.choose(1, 1), threads.choose(4, 1)) == (1, 1)
    assert (threads.choose(1, 2), threads.choose(4, 2)) == (2, 2)


def test_a_number_that_was_found_out_is_kept_when_more_are_to_be_had():
    threads = StepThreads(4)
    run(threads, contended, 20 * FIRST_PAUSE, limit=2)
    assert run(threads, contended, 3, limit=4).count(1) == 3


def test_helpers_leave_the_steps_the_other_processors():
    helpers = Helpers(4)
    assert [helpers.leave(4), helpers.leave(9)] == [4, 9], "nobody is there"
    with helpers, helpers:
        assert [helpers.leave(n_threads) for n_threads in (1, 2, 3, 4)] == [1, 2, 2, 2]
        with helpers, helpers, helpers:
            assert helpers.leave(4) == 1
    assert (helpers.leave(4), helpers.n_begun) == (4, 5)


def test_a_trial_that_is_stuck_is_one_step():
    used = run(StepThreads(2), lambda n: 0.010 if n == 2 else 3.0, 4 * FIRST_PAUSE)
    assert used.count(1) == 1


def test_steps_that_take_longer_are_no_reason_for_more_threads():
    """Others have come, or the context has grown."""
    threads = StepThreads(2)
    run(threads, contended, 4 * FIRST_PAUSE)
    before = run(threads, contended, LONGEST_PAUSE).count(2)
    assert run(threads, lambda n: 3 * contended(n), LONGEST_PAUSE).count(2) <= before


def test_fewer_rows_begin_with_the_threads_of_more_and_more_rows_with_all():
    threads = StepThreads(2)
    run(threads, contended, 4 * FIRST_PAUSE, n_rows=4)
    assert (threads.choose(2), threads.choose(16)) == (1, 2)
    assert threads.choose(32, limit=1) == 1


def test_two_numbers_that_are_as_good_are_not_tried_all_the_time():
    """Noise of a tenth, and no difference but that."""
    noise = random.Random(5)
    used = run(StepThreads(2), lambda n: 0.010 * noise.uniform(0.9, 1.1), 20 * LONGEST_PAUSE)
    n_changes = sum(before != after for before, after in pairwise(used))
    assert n_changes < len(used) / 16


def test_a_single_processor_has_no_choice():
    assert set(run(StepThreads(1), quiet, 2 * LONGEST_PAUSE)) == {1}


class Clocks:
    """A machine of `n_processors`, over seconds that pass when told."""

    def __init__(self, n_processors: int) -> None:
        self.n_processors = n_processors
        self.now = Usage(100.0, 7.0, 5000.0)

    def __call__(self) -> Usage:
        return self.now

    def go_by(self, seconds: float, *, own: float, others: float = 0.0) -> None:
        """We and others used so many processors."""
        idle = self.n_processors - own - others
        self.now = Usage(
            self.now.at_s + seconds, self.now.own_s + own * seconds, self.now.idle_s + max(0.0, idle) * seconds
        )


class Prompts:
    """Batches of prompts, each beside what others compute meanwhile."""

    def __init__(self, n_processors: int) -> None:
        self.clocks = Clocks(n_processors)
        self._most = n_processors
        self.n_free = float(n_processors)
        self._threads = PromptThreads(self.clocks, lambda: self.n_free)

    def choose(self) -> int:
        return self._threads.choose(self._most)

    def compute(self, seconds: float, *, own: float, others: float = 0.0) -> int:
        """A batch was computed. The threads of the next one."""
        self.choose()
        self.clocks.go_by(seconds, own=own, others=others)
        self._threads.note_batch(self.clocks.now.at_s)
        return self.choose()

    def step(self, seconds: float, *, own: float, others: float = 0.0) -> None:
        """Streams were computed."""
        self.clocks.go_by(seconds, own=own, others=others)
        self._threads.note_step(self.clocks.now.at_s)


def test_prompts_get_every_processor_of_a_quiet_machine():
    prompts = Prompts(16)
    assert prompts.choose() == 16
    for own in (0.0, 16.0, 3.5):
        assert prompts.compute(1.0, own=own) == 16


def test_the_daemon_and_its_clients_take_no_processor_away():
    assert Prompts(2).compute(1.0, own=1.5, others=0.5) == 2


def test_prompts_leave_the_processors_that_others_compute_on_and_come_back():
    prompts = Prompts(2)
    # Two threads of ours and one of theirs share alike.
    assert prompts.compute(1.0, own=4 / 3, others=2 / 3) == 1
    assert prompts.compute(1.0, own=1.0, others=1.0) == 1
    assert prompts.compute(1.0, own=1.0) == 2


def test_a_batch_of_a_large_model_takes_long_and_counts():
    assert Prompts(2).compute(30.0, own=4 / 3, others=2 / 3) == 1


def test_what_others_computed_while_there_were_no_prompts_does_not_count():
    prompts = Prompts(2)
    prompts.clocks.go_by(10.0, own=0.0, others=2.0)
    assert prompts.choose() == 2
    assert prompts.compute(1.0, own=1.0, others=1.0) == 1
    prompts.clocks.go_by(2 * STALE_S, own=0.0, others=2.0)
    assert prompts.choose() == 2


def test_after_a_pause_what_others_do_at_this_moment_counts():
    prompts = Prompts(4)
    prompts.n_free = 2.0
    assert prompts.choose() == 2
    prompts.clocks.go_by(2 * STALE_S, own=0.0)
    prompts.n_free = -3.0
    assert prompts.choose() == 1


def test_what_others_did_while_we_did_little_does_not_count():
    prompts = Prompts(2)
    assert prompts.compute(0.35, own=0.5, others=1.0) == 2, "short requests of ours and of another server in turn"
    prompts.n_free = 1.0
    assert prompts.compute(0.35, own=0.5, others=1.0) == 1, "it computes at this moment"
    prompts.n_free = math.inf
    assert prompts.compute(0.35, own=0.5, others=1.0) == 1, "the system does not tell"


def test_what_others_did_beside_streams_counts_for_the_prompt_that_comes_then():
    prompts = Prompts(2)
    for _ in range(20):
        prompts.step(0.1, own=1.0, others=1.0)
    assert prompts.choose() == 1
    for _ in range(20):
        prompts.step(0.1, own=1.0)
    assert prompts.choose() == 2


def test_what_was_busy_for_a_moment_when_streams_began_is_soon_forgotten():
    prompts = Prompts(2)
    prompts.n_free = 1.0
    assert prompts.choose() == 1
    while prompts.clocks.now.at_s < 100 + 1.5 * WINDOW_S:
        prompts.step(0.02, own=1.0)
    assert prompts.choose() == 2


def test_there_is_always_a_thread():
    prompts = Prompts(2)
    prompts.n_free = -3.0
    assert prompts.compute(1.0, own=0.2, others=1.8) == 1


def test_a_moment_says_nothing():
    assert Prompts(2).compute(WINDOW_S / 2, own=0.1, others=1.9) == 2
