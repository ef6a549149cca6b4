"""When a trial of numbers of threads computes and when not, over a made context; then a real one, in a real engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from localrun.engine.backend import Batch, DecodeFailed
from localrun.engine.native import threads
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.native.threads import QUIET_S, ThreadTrial, plan_threads, step_s
from localrun.hardware import thread_choice
from localrun.hardware.processors import Processors
from localrun.hardware.thread_choice import ModelShape, SavedChoice, Threads
from localrun.wire import Ready
from tests.engine.conftest import compute, open_tiny
from tests.engine.test_process import OPEN, child, submit

USUAL, ALL = 4, 8
WITH_SMT = Processors(name="made", n_machine=ALL, n_allowed=ALL, performance_cores=USUAL)
ONE_KIND = Processors(name="made", n_machine=USUAL, n_allowed=USUAL, performance_cores=USUAL)
SMALL = replace(OPEN, n_threads=0, n_layers=2, weights_bytes=1000, model="small")

Cost = Callable[[int, int], float]


def hyperthreads_help_prompts(n_threads: int, n_rows: int) -> float:
    """Seconds of a step: streams wait for memory, prompts compute."""
    return 0.004 if n_rows <= 4 else 0.16 / n_threads


class MadeContext:
    """Takes as long as `cost` says, on a clock of its own; refuses rows that a real context would refuse."""

    def __init__(self, cost: Cost = hyperthreads_help_prompts) -> None:
        self.now_s = 100.0
        self.batch = Batch(threads.N_BATCH)
        self.is_open = False
        self.n_opened = self.n_decodes = 0
        self._cost = cost
        self._threads = Threads(1, 1)
        self._lengths = [0] * threads.N_SEQS

    @contextmanager
    def opened(self) -> Iterator[MadeContext]:
        self.is_open, self.n_opened = True, self.n_opened + 1
        try:
            yield self
        finally:
            self.is_open = False

    def clock(self) -> float:
        return self.now_s

    def set_threads(self, threads: Threads) -> None:
        self._threads = threads

    def decode(self, n_rows: int) -> None:
        assert self.is_open
        for seq, position in zip(self.batch.seq[:n_rows], self.batch.pos[:n_rows], strict=True):
            assert position == self._lengths[seq]
            self._lengths[seq] += 1
        assert sum(self._lengths) <= threads.N_CELLS
        self.now_s += self._cost(self._threads.decode if n_rows <= 4 else self._threads.prompt, n_rows)
        self.n_decodes += 1

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        assert (start, end) == (0, -1)
        self._lengths[seq] = 0
        return True


class Trial:
    """A trial over a made context, and what came out; other programs take so many processors meanwhile."""

    def __init__(
        self, context: MadeContext, candidates: tuple[int, ...] = (USUAL, ALL), *, others: float = 0.0
    ) -> None:
        self.context = context
        self.results: list[Threads] = []
        self.trial = ThreadTrial(
            candidates, context.opened, self.results.append, context.clock, lambda: others * context.now_s
        )

    def call(self, *, is_idle: bool = True) -> float | None:
        """What the engine's loop does: a call, and then it waits for as long as the answer says."""
        pause_s = self.trial(is_idle)
        self.context.now_s += pause_s or 0.0
        return pause_s

    def run(self) -> list[Threads]:
        while not self.trial.is_over:
            self.call()
        return self.results


def test_streams_and_prompts_get_the_numbers_that_suit_them():
    context = MadeContext()
    assert Trial(context).run() == [Threads(decode=USUAL, prompt=ALL)]
    assert (context.n_opened, context.is_open) == (1, False)


def test_nothing_is_computed_before_the_engine_was_idle_for_a_while():
    context = MadeContext()
    trial = Trial(context)
    assert trial.trial(True) == pytest.approx(QUIET_S)
    context.now_s += QUIET_S / 2
    assert trial.trial(False) is None  # a request came
    assert trial.trial(True) == pytest.approx(QUIET_S)
    context.now_s += QUIET_S / 2
    assert trial.trial(True) == pytest.approx(QUIET_S / 2)
    assert context.n_opened == 0
    context.now_s += QUIET_S
    assert trial.trial(True) == 0.0
    assert context.n_opened == 1


def test_a_request_in_the_middle_is_served_and_the_trial_goes_on_later():
    context = MadeContext()
    trial = Trial(context)
    for index in range(12):
        n_decodes = context.n_decodes
        trial.call(is_idle=index != 8)
        assert index != 8 or context.n_decodes == n_decodes
    assert trial.run() == [Threads(decode=USUAL, prompt=ALL)]
    assert context.n_opened == 1


def test_a_call_computes_a_few_steps_and_all_calls_together_about_the_limit():
    context = MadeContext()
    trial = Trial(context)
    longest_s, began_s, n_calls = 0.0, context.now_s + QUIET_S, 0
    while not trial.trial.is_over:
        before_s, n_decodes = context.now_s, context.n_decodes
        pause_s = trial.trial(True)
        n_calls += pause_s == 0.0
        longest_s = max(longest_s, context.now_s - before_s)
        assert context.n_decodes - n_decodes <= 1 + threads.N_STEPS
        context.now_s += pause_s or 0.0
    assert longest_s < 0.005 + max(threads.TRIAL_PIECE_S, 0.16 / USUAL)
    assert n_calls > 20
    assert context.now_s - began_s < 1.2 * threads.LIMIT_S


@pytest.mark.parametrize(("seconds", "n_rows"), [(0.04, threads.PROMPT_ROWS), (0.06, threads.SLOW_PROMPT_ROWS)])
def test_a_model_with_long_steps_gets_a_shorter_prompt(seconds: float, n_rows: int):
    seen: set[int] = set()

    def cost(n_threads: int, rows: int) -> float:
        seen.add(rows)
        return seconds

    assert Trial(MadeContext(cost)).run() == [Threads(USUAL, USUAL)]
    assert seen == {*threads.STREAMS, n_rows}


def test_a_model_whose_steps_take_too_long_is_left_alone():
    context = MadeContext(lambda n_threads, n_rows: 0.8)
    assert Trial(context).run() == []
    assert context.n_decodes == 6  # one number of threads, each piece with its first step
    assert not context.is_open


def test_a_busy_machine_tells_nothing(caplog: pytest.LogCaptureFixture):
    times = iter(np.random.default_rng(1).uniform(0.004, 0.04, 10_000))
    with caplog.at_level(logging.INFO):
        assert Trial(MadeContext(lambda n_threads, n_rows: float(next(times)))).run() == []
    assert "too busy" in caplog.text


def test_nor_does_one_where_others_compute_steadily():
    assert Trial(MadeContext(), others=0.1).run() == [Threads(decode=USUAL, prompt=ALL)]
    assert Trial(MadeContext(), others=0.2).run() == []


def test_a_failure_ends_the_trial_and_nothing_else(caplog: pytest.LogCaptureFixture):
    def fail(n_threads: int, n_rows: int) -> float:
        raise DecodeFailed("llama_decode returned -3", is_fatal=True)

    context = MadeContext(fail)
    assert Trial(context).run() == []
    assert not context.is_open
    assert "the trial of threads failed" in caplog.text


def test_a_trial_that_is_given_up_frees_its_context():
    context = MadeContext()
    trial = Trial(context)
    for _ in range(5):
        trial.call()
    assert context.is_open
    trial.trial.close()
    assert not context.is_open
    assert trial.call() is None
    assert trial.results == []


# --- what an engine begins with --------------------------------------------------------------------------------------


def entry(threads: Threads, *, build: str = "b") -> SavedChoice:
    return SavedChoice(
        processors=WITH_SMT.identity, build=build, shape=ModelShape(2, 1000), threads=threads, model="m",
        n_tried=(4, 8), at_s=0.0,
    )  # fmt: skip


def test_a_number_that_is_asked_for_comes_before_all_else(tmp_path: Path):
    path = tmp_path / "threads.json"
    thread_choice.keep(path, entry(Threads(2, 2)))
    plan = plan_threads(replace(SMALL, n_threads=7, threads_file=str(path)), WITH_SMT, lambda: "b")
    assert (plan.start, plan.kept) == (Threads(7, 7), None)


def test_there_are_no_more_threads_than_processors(caplog: pytest.LogCaptureFixture):
    plan = plan_threads(replace(SMALL, n_threads=512), WITH_SMT, lambda: "b")
    assert plan.start == Threads(ALL, ALL)
    assert f"512 threads were asked for; {ALL} compute" in caplog.text


def test_what_is_kept_is_used_and_nothing_is_tried(tmp_path: Path):
    path = tmp_path / "threads.json"
    thread_choice.keep(path, entry(Threads(4, 8)))
    opened = replace(SMALL, threads_file=str(path))
    assert plan_threads(opened, WITH_SMT, lambda: "b").start == Threads(4, 8)
    assert plan_threads(opened, WITH_SMT, lambda: "b").kept is None
    assert plan_threads(opened, WITH_SMT, lambda: "another").kept is not None
    assert plan_threads(replace(opened, use_extra_bufts=False), WITH_SMT, lambda: "b").kept is not None


def test_without_knowledge_one_thread_for_each_core_and_a_trial_where_there_is_a_choice(tmp_path: Path):
    opened = replace(SMALL, threads_file=str(tmp_path / "threads.json"))
    plan = plan_threads(opened, WITH_SMT, lambda: "b")
    assert (plan.start, plan.candidates) == (Threads(4, 4), (4, 8))
    assert plan.kept is not None
    made = plan.kept(Threads(4, 8), 5.0)
    assert (made.model, made.shape, made.n_tried, made.at_s) == ("small", ModelShape(2, 1000), (4, 8), 5.0)
    assert plan_threads(opened, ONE_KIND, lambda: "b").kept is None
    assert plan_threads(SMALL, WITH_SMT, lambda: "b").kept is None  # nowhere to keep it


# --- real contexts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_split", [False, True])
def test_another_number_of_threads_computes_the_same(tiny_gguf: Path, may_split: bool):
    backend = open_tiny(tiny_gguf, may_split=may_split)
    prompt = list(range(3, 40))
    try:
        with_one = compute(backend, 0, prompt)
        for number in (Threads(2, 1), Threads(1, 2), Threads(2, 2), Threads(1, 1)):
            backend.set_threads(number)
            assert backend.n_threads == number.decode
            backend.seq_remove(0, 0)
            assert np.allclose(compute(backend, 0, prompt), with_one, atol=1e-4)
            assert np.isfinite(compute(backend, 1, prompt[:1])).all()
            backend.seq_remove(1, 0)
    finally:
        backend.close()


def test_measuring_leaves_the_sequences_of_the_engine_alone(backend: LlamaBackend):
    first = compute(backend, 0, [5, 6, 7])
    with backend.measured_context(2, n_cells=threads.N_CELLS, n_seqs=4, n_batch=threads.N_BATCH) as context:
        context.set_threads(Threads(2, 2))
        seconds = step_s(context, iter(range(100)).__next__, n_seqs=4, n_each=1, n_steps=3)
        seconds += step_s(context, iter(range(100)).__next__, n_seqs=1, n_each=threads.PROMPT_ROWS)
    assert seconds == [1] * 4
    again = compute(backend, 0, [8], start=3)
    backend.seq_remove(0, 0)
    assert np.array_equal(compute(backend, 0, [5, 6, 7]), first)
    assert np.allclose(compute(backend, 0, [8], start=3), again, atol=1e-4)


# An engine on a machine of two fast cores and a slow one.
ON_A_HYBRID = """
import sys
from localrun.hardware import processors
from localrun.engine import process
from localrun.engine.native import threads
from localrun.hardware.processors import Processors
made = Processors(name="made", n_machine=3, n_allowed=3, performance_cores=1, efficiency_cores=1)
processors.usable = lambda: made
# Whoever else computes here now, and however slow that makes a round.
threads.is_steady, threads.MOST_OTHERS, threads.ROUND_LIMIT_S = lambda samples: True, 99, 1e9
threads.MAX_ROUNDS = 2
sys.exit(process.main(process.LLAMA))
"""


def test_an_idle_engine_tries_keeps_and_uses_next_time(tiny_gguf: Path, tmp_path: Path):
    path = tmp_path / "threads.json"
    opened = replace(SMALL, model_path=str(tiny_gguf), n_slots=2, threads_file=str(path))
    with child("-c", ON_A_HYBRID) as engine:
        engine.send(opened)
        ready = engine.receive()
        assert isinstance(ready, Ready)
        assert ready.n_threads == 1
        engine.send(submit(1, n_predict=4))
        assert engine.finals(1)[1].n_output == 4
        for line in engine.process.stderr:  # type: ignore[union-attr]
            if b"are good for streams" in line:
                break
        engine.send(submit(2, n_predict=4))
        assert engine.finals(1)[2].n_output == 4
        engine.process.stdin.close()  # type: ignore[union-attr]
        assert engine.exit_code() == 0
    (kept,) = thread_choice.read(path)
    assert (kept.model, kept.n_tried, kept.shape) == ("small", (1, 2, 3), ModelShape(2, 1000))
    assert {kept.threads.decode, kept.threads.prompt} <= {1, 2, 3}
    thread_choice.keep(path, replace(kept, threads=Threads(3, 2)))
    with child("-c", ON_A_HYBRID) as engine:
        engine.send(opened)
        ready = engine.receive()
        assert isinstance(ready, Ready)
        assert ready.n_threads == 3
        engine.process.stdin.close()  # type: ignore[union-attr]
        assert engine.exit_code() == 0
    assert len(thread_choice.read(path)) == 1


def test_an_engine_that_ends_in_the_middle_of_a_trial_ends_well(tiny_gguf: Path, tmp_path: Path):
    endless = "threads.QUIET_S, threads.MAX_ROUNDS, threads.LIMIT_S = 0.0, 10**9, 1e9\nsys.exit"
    with child("-c", ON_A_HYBRID.replace("sys.exit", endless)) as engine:
        engine.send(replace(SMALL, model_path=str(tiny_gguf), threads_file=str(tmp_path / "threads.json")))
        assert isinstance(engine.receive(), Ready)
        engine.send(submit(1, n_predict=4))
        assert engine.finals(1)[1].n_output == 4
        engine.process.stdin.close()  # type: ignore[union-attr]
        assert engine.exit_code() == 0
        assert b"Traceback" not in engine.process.stderr.read()  # type: ignore[union-attr]
    assert not (tmp_path / "threads.json").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_an_engine_that_is_bound_to_one_processor_computes_with_one_thread(tiny_gguf: Path):
    bound = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from localrun.engine import process
sys.exit(process.main(process.LLAMA))
"""
    with child("-c", bound) as engine:
        engine.send(replace(SMALL, model_path=str(tiny_gguf)))
        ready = engine.receive()
        assert isinstance(ready, Ready)
        assert ready.n_threads == 1
        engine.send(submit(1, n_predict=4))
        assert engine.finals(1)[1].n_output == 4
