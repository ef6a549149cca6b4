"""One of those who are computed in the background leaves: the others lose nothing, and neither does the cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.engine.backend import DecodeFailed
from localrun.engine.engine import Engine, Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Delta, Finish, Lane, Sampling, Submit
from tests.engine.conftest import open_tiny
from tests.engine.harness import Harness, expected_output
from tests.engine.stepped import SteppedEngine
from tests.fakes.backend import FakeBackend, FakeWorker

ONE = [97 + at % 20 for at in range(200)]
OTHER = ONE[::-1]


class CountsHalts(FakeWorker):
    n_halts = 0

    def halt(self) -> None:
        self.n_halts += 1
        super().halt()


def harness(worker: type[FakeWorker] = CountsHalts) -> Harness:
    fake = FakeBackend(
        n_cells=1024, n_seqs=12, n_batch=64, n_slots=4, n_background_seqs=2, background_looks=4, worker=worker
    )
    run = Harness(n_cells=1024, n_slots=4, n_batch=64, is_split=True, target_itl_s=0.02, wrap=lambda _: fake)
    run.submit(1, ONE, n_predict=4, lane=Lane.BATCH)
    run.submit(2, OTHER, n_predict=4)
    while len(n_rows_of(run.engine)) < 2:
        run.step()
    return run


def n_rows_of(engine: Engine) -> Counter[int]:
    """Rows of each sequence in the batch under way."""
    return Counter(engine.background.seqs)


def n_halts(run: Harness) -> int:
    return run.backend.worker.n_halts


def n_rows_for_both(run: Harness) -> int:
    run.run()
    return run.backend.n_rows_computed


def test_the_batch_of_the_others_goes_on():
    whole = n_rows_for_both(harness())
    run = harness()
    run.engine.cancel(1)
    run.step()
    assert run.finals[1].finish is Finish.CANCELLED, "heard at once"
    assert not n_halts(run)
    assert n_rows_for_both(run) < whole, "nothing was computed twice"
    assert run.tokens[2] == expected_output(OTHER, 4)


def test_what_was_computed_for_a_cancelled_prompt_is_kept():
    run = harness()
    n_away = {request.id: n_rows_of(run.engine)[request.seq] for request in run.engine.scheduler.running}
    run.engine.cancel(1)
    run.run()
    run.submit(3, ONE, n_predict=4)
    run.run()
    assert run.finals[3].usage.n_cached == n_away[1]
    assert run.tokens[3] == expected_output(ONE, 4)


def test_a_batch_that_nobody_waits_for_is_given_up():
    run = harness()
    for request_id in (1, 2):
        run.engine.cancel(request_id)
        run.check()
    assert n_halts(run) == 1
    run.run()
    assert {final.finish for final in run.finals.values()} == {Finish.CANCELLED}


def test_a_preempted_prompt_comes_back_while_its_old_sequence_is_still_computed():
    run = harness()
    for request_id in (3, 4, 5):  # the last one needs the slot of the first
        run.submit(request_id, [70 + request_id], n_predict=20, lane=Lane.INTERACTIVE)
    run.run()
    assert run.engine.totals.preemptions == 1
    assert not n_halts(run)
    assert run.tokens[1] == expected_output(ONE, 4)
    assert run.tokens[2] == expected_output(OTHER, 4)


class FailsOnce(CountsHalts):
    """The first batch is broken off half way."""

    def finish(self) -> None:
        if not self.n_halts:
            self.halt()
            raise DecodeFailed("broken off", is_fatal=True)
        super().finish()


def test_a_batch_that_fails_after_somebody_left_is_computed_again_for_the_rest():
    run = harness(FailsOnce)
    run.engine.cancel(1)
    run.run()
    assert run.tokens[2] == expected_output(OTHER, 4)
    run.submit(3, ONE, n_predict=4)
    run.run()
    assert run.tokens[3] == expected_output(ONE, 4)


def test_the_cache_can_be_cleared_and_the_engine_closed_after_somebody_left():
    for end in (lambda run: run.engine.clear_cache(ram=True, disk=True), lambda run: run.engine.close()):
        run = harness()
        run.engine.cancel(1)
        end(run)
        run.check()
        run.run()


# --- llama.cpp -----------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tiny_gguf: Path) -> Iterator[LlamaBackend]:
    backend = open_tiny(tiny_gguf, n_cells=2048, n_seqs=4, n_batch=192, may_split=True)
    yield backend
    backend.close()


def run_all(engine: Engine) -> tuple[dict[int, list[int]], dict[int, Delta]]:
    tokens: dict[int, list[int]] = {}
    finals: dict[int, Delta] = {}
    while not engine.is_idle:
        step = engine.step()
        for delta in step.deltas if step else ():
            tokens.setdefault(delta.id, []).extend(delta.tokens)
            if delta.finish:
                finals[delta.id] = delta
    return tokens, finals


def test_in_llama_cpp_too(split: LlamaBackend):
    one, other = ([300 + at * step % 900 for at in range(400)] for step in (7, 11))

    def submit(engine: Engine, request_id: int, prompt: list[int]) -> None:
        greedy = Sampling(temperature=0)
        engine.submit(Submit(id=request_id, sampling=greedy, n_predict=6, ignore_eos=True), list(prompt))

    plain = SteppedEngine(split, Limits(4, 8, 0.0, 0), time.monotonic)
    submit(plain, 1, one)
    submit(plain, 2, other)
    expected, _ = run_all(plain)
    plain.close()
    split.rebuild()
    engine = SteppedEngine(split, Limits(4, 8, 0.0, 1 << 28), time.monotonic)
    # A busy machine may find that such a small model computes quicker than it copies.
    engine.cache.tiers.recompute_s = lambda _start, n_tokens: float(n_tokens)
    submit(engine, 1, one)
    submit(engine, 2, other)
    # On a busy machine batches may be so small that what the first ones compute is not worth keeping.
    engine.step()
    first = engine.scheduler.running[0]
    while len(n_rows_of(engine)) < 2 or first.n_computed + n_rows_of(engine)[first.seq] < 64:
        engine.step()
    engine.cancel(1)
    tokens, finals = run_all(engine)
    assert finals[1].finish is Finish.CANCELLED
    # Of the first token alone: batches of other sizes round differently.
    assert tokens[2][0] == expected[2][0]
    submit(engine, 3, one)
    tokens, finals = run_all(engine)
    assert finals[3].usage.n_cached > 0
    assert tokens[3][0] == expected[1][0]
    engine.close()
