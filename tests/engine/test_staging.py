"""Long prompts in the background: an engine on the split fake backend, and the turns of streams by a set clock."""

from __future__ import annotations

import math

import pytest

from localrun.engine.backend import DecodeFailed
from localrun.engine.fake import FakeBackend
from localrun.engine.native.background import FINISH_S, Staging
from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.scheduler import Grant
from localrun.wire import Finish, Sampling
from tests.engine.harness import Harness, expected_output

LONG = [97 + at % 20 for at in range(200)]


def harness(**options: object) -> Harness:
    return Harness(
        **{
            "n_cells": 1024,
            "n_slots": 4,
            "n_batch": 64,
            "is_split": True,
            "n_staging_seqs": 2,
            "target_itl_s": 0.02,
            **options,
        }  # type: ignore[arg-type]
    )


def start_streams(run: Harness, count: int) -> None:
    for request_id in range(count):
        run.submit(request_id, [65 + request_id] * 20, n_predict=120)
    while min(len(run.tokens.get(request_id, [])) for request_id in range(count)) < 3:
        run.step()


def test_streams_go_on_while_a_long_prompt_is_computed():
    run = harness(staging_waits=6)
    start_streams(run, 2)
    run.submit(9, LONG, n_predict=4)
    before = len(run.tokens[0])
    while not run.tokens.get(9):
        run.step()
    assert len(run.tokens[0]) > before + 3, "the stream had steps in between"
    run.run()
    assert run.tokens[9] == expected_output(LONG, 4)
    assert run.tokens[0] == expected_output([65] * 20, 120)


def test_a_short_prompt_does_not_go_through_the_background():
    run = harness(staging_waits=1000)
    run.submit(1, LONG, n_predict=4)
    run.step()
    assert run.backend.is_staging
    run.submit(2, [66] * 30, n_predict=4)
    for _ in range(20):
        run.step()
    assert run.finals[2].finish is Finish.LENGTH, "done while the long one is still being computed"
    assert 1 not in run.finals


@pytest.mark.parametrize("cancelled", [1, 2, 3])
def test_a_cancelled_prompt_leaves_the_background_at_once(cancelled: int):
    """Also one that has a place there but no part in the batch under way, and nothing computed yet."""
    run = harness(staging_waits=1000, n_batch=16)
    prompts = {1: LONG, 2: LONG[::-1], 3: [98] * 150}
    for request_id, prompt in prompts.items():
        run.submit(request_id, prompt, n_predict=4)
    run.step()
    run.step()
    run.engine.cancel(cancelled)
    run.check()
    assert cancelled not in {request.id for request in run.engine.scheduler.running}
    run.backend._staging_waits = 1
    run.run()
    for request_id, prompt in prompts.items():
        if request_id != cancelled:
            assert run.tokens[request_id] == expected_output(prompt, 4)


class FailsOnce(FakeBackend):
    """The first batch of the background is broken off half way."""

    n_failed = 0

    def staging_finish(self) -> None:
        if self.n_failed == 0:
            self.n_failed = 1
            self.staging_abort()
            raise DecodeFailed("broken off", is_fatal=True)
        super().staging_finish()


def test_a_batch_that_fails_is_computed_again():
    def failing(_: FakeBackend) -> FakeBackend:
        return FailsOnce(n_cells=1024, n_seqs=12, n_batch=64, n_slots=4, n_staging_seqs=2)

    run = harness(wrap=failing)
    run.submit(1, LONG, n_predict=4)
    run.run()
    assert run.tokens[1] == expected_output(LONG, 4)


def test_a_request_that_outgrows_its_stream_gets_one_pool_and_nobody_loses_anything():
    run = harness(n_cells=512)
    start_streams(run, 2)
    assert run.backend.is_split
    run.submit(9, LONG, n_predict=150)
    while 9 not in run.finals:
        run.step()
        if run.tokens.get(9):
            assert not run.backend.is_split, "a stream has 128 cells"
    run.run()
    run.submit(10, [70] * 10, n_predict=4)
    run.run()
    assert run.backend.is_split, "split again once nobody needs more"
    assert run.tokens[9] == expected_output(LONG, 150)
    assert run.tokens[0] == expected_output([65] * 20, 120)
    assert run.finals[9].usage is not None
    assert run.engine.totals.cached_tokens >= 0


def test_books_that_disagree_end_the_engine_when_it_has_nothing_else_to_do():
    run = harness()
    run.submit(1, LONG, n_predict=4)
    while 1 not in run.finals:
        run.step()
    run.engine.cache.cells.place([3] * 7)
    with pytest.raises(AssertionError, match="sequence 3"):
        step_often(run)


def step_often(run: Harness) -> None:
    for _ in range(20):
        run.engine.step()


def test_one_pool_has_no_background_for_its_many_sequences():
    """A request that outgrows its share brings one pool about, whose sequences have numbers that split streams lack."""
    run = harness(ram_cache_bytes=0)
    run.submit(0, [65 + at % 9 for at in range(300)], n_predict=400)
    for request_id in range(1, 12):
        run.submit(request_id, [66 + request_id, 70 + request_id, 80 + request_id] * 5, n_predict=2)
        for _ in range(8):
            run.step()
    run.run()
    assert all(run.finals[request_id].n_output == 2 for request_id in range(1, 12))


def test_the_fake_refuses_a_background_that_it_has_not_as_llama_cpp_does():
    backend = FakeBackend(n_cells=256, n_seqs=4, n_batch=16, n_slots=4)
    with pytest.raises(ValueError, match="nothing in the background"):
        backend.staging_start(1)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def under_way(clock: Clock, *, waits: int = 10**6) -> Staging:
    """A staging whose background is busy, after a streams' step of 10 ms that ended now."""
    backend = FakeBackend(n_cells=256, n_seqs=4, n_batch=16, n_slots=4, n_staging_seqs=1, staging_waits=waits)
    staging = Staging(backend, clock)
    sampler = backend.sampler(Sampling(), ignore_eos=True)
    request = Request(id=1, tokens=[97] * 9, n_prompt=9, max_output=1, sampler=sampler, text=TextStream(()))
    request.seq = backend.n_seqs
    staging.start([Grant(request, 2)])
    staging.note_step(0.01, has_streams=True)
    return staging


def test_streams_have_their_turn_when_their_token_is_due():
    clock = Clock()
    staging = under_way(clock)
    assert not staging.wait_for_turn(0.1)
    assert not staging.is_turn_near(0.1)
    clock.now_s += 0.09 - FINISH_S / 2
    assert not staging.wait_for_turn(0.1)
    assert staging.is_turn_near(0.1)
    clock.now_s += FINISH_S / 2
    assert staging.wait_for_turn(0.1), "the step itself takes the last 10 ms of the target"


def test_a_batch_that_is_over_waits_for_nothing():
    clock = Clock()
    staging = under_way(clock, waits=1)
    assert staging.is_over()
    assert staging.wait_for_turn(0.1), "a wait would be a busy one"


def test_a_batch_in_the_middle_of_a_prompt_goes_on_at_once():
    run = harness(staging_waits=1)
    start_streams(run, 1)
    run.submit(9, LONG, n_predict=4)
    batches = []
    while not run.tokens.get(9):
        run.step()
        staging = run.engine._staging
        if staging.is_busy:
            batches.append(staging.completes_prompt)
    assert batches[0] is False
    assert batches[-1] is True


def test_the_background_gets_as_long_as_a_step_takes_whatever_the_target():
    clock = Clock()
    staging = under_way(clock)
    assert staging.left_s(0.001) == pytest.approx(0.01)
    assert staging.left_s(None) == pytest.approx(0.01), "prompts among the streams take turns with it"


def test_streams_without_a_target_wait_for_the_batch():
    staging = under_way(Clock())
    assert staging.left_s(0.0) == math.inf
    assert not staging.is_turn_near(0.0)
