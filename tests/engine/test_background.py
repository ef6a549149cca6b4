"""Long prompts in the background: an engine on the split fake backend."""

from __future__ import annotations

import pytest

from localrun.engine.backend import DecodeFailed
from localrun.engine.schedule.background import MOVE_TO_STREAM_S
from localrun.wire import Finish, Lane
from tests.engine.harness import Harness, expected_output
from tests.fakes.backend import FakeBackend, FakeWorker

LONG = [97 + at % 20 for at in range(200)]


def harness(**options: object) -> Harness:
    return Harness(
        **{
            "n_cells": 1024,
            "n_slots": 4,
            "n_batch": 64,
            "is_split": True,
            "n_background_seqs": 2,
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
    run = harness(background_looks=12)
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
    run = harness(background_looks=1000)
    run.submit(1, LONG, n_predict=4)
    run.step()
    assert run.backend.worker.is_busy
    run.submit(2, [66] * 30, n_predict=4)
    for _ in range(20):
        run.step()
    assert run.finals[2].finish is Finish.LENGTH, "done while the long one is still being computed"
    assert 1 not in run.finals


@pytest.mark.parametrize("cancelled", [1, 2, 3])
def test_a_cancelled_prompt_leaves_the_background_at_once(cancelled: int):
    """Also one that has a place there but no part in the batch under way, and nothing computed yet."""
    run = harness(background_looks=1000, n_batch=16)
    prompts = {1: LONG, 2: LONG[::-1], 3: [98] * 150}
    for request_id, prompt in prompts.items():
        run.submit(request_id, prompt, n_predict=4)
    run.step()
    run.step()
    run.engine.cancel(cancelled)
    run.check()
    assert cancelled not in {request.id for request in run.engine.scheduler.running}
    run.backend.background_looks = run.backend.worker.n_looks_left = 1
    run.run()
    for request_id, prompt in prompts.items():
        if request_id != cancelled:
            assert run.tokens[request_id] == expected_output(prompt, 4)


class FailsOnce(FakeWorker):
    """The first batch of the background is broken off half way."""

    n_failed = 0

    def finish(self) -> None:
        if self.n_failed == 0:
            self.n_failed = 1
            self.halt()
            raise DecodeFailed("broken off", is_fatal=True)
        super().finish()


def test_a_batch_that_fails_is_computed_again():
    def failing(_: FakeBackend) -> FakeBackend:
        return FakeBackend(n_cells=1024, n_seqs=12, n_batch=64, n_slots=4, n_background_seqs=2, worker=FailsOnce)

    run = harness(wrap=failing)
    run.submit(1, LONG, n_predict=4)
    run.run()
    assert run.tokens[1] == expected_output(LONG, 4)


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


def test_short_requests_come_and_go_beside_a_long_one():
    run = harness(ram_cache_bytes=0)
    run.submit(0, [65 + at % 9 for at in range(300)], n_predict=400)
    for request_id in range(1, 12):
        run.submit(request_id, [66 + request_id, 70 + request_id, 80 + request_id] * 5, n_predict=2)
        for _ in range(8):
            run.step()
    run.run()
    assert all(run.finals[request_id].n_output == 2 for request_id in range(1, 12))


def test_a_batch_in_the_middle_of_a_prompt_goes_on_at_once():
    run = harness(background_looks=1)
    start_streams(run, 1)
    run.submit(9, LONG, n_predict=4)
    batches = []
    while not run.tokens.get(9):
        run.step()
        if run.backend.worker.is_busy:
            batches.append(bool(run.engine.background.completes))
    assert batches[0] is False
    assert batches[-1] is True


def stream_beside_a_prompt() -> Harness:
    """The stream, which wants a token every 100 ms, had its step just now; the prompt is not done for a long time."""
    run = harness(background_looks=10**6, target_itl_s=0.1, n_batch=256)
    start_streams(run, 1)
    run.submit(9, LONG, n_predict=4)
    run.step()
    n_tokens = len(run.tokens[0])
    while len(run.tokens[0]) == n_tokens:
        run.step()
    assert run.backend.worker.is_busy
    return run


def n_steps_until_its_turn(run: Harness, *, left_s: float) -> int:
    """Rounds without a step for the stream, if `left_s` are left until it is due."""
    run.now_s += run.engine.scheduler.due_in_s(run.now_s) - left_s
    n_rows = run.backend.n_rows_computed
    for n_steps in range(100):
        run.step()
        if run.backend.n_rows_computed > n_rows:
            return n_steps
    raise AssertionError("it never has its turn")


def test_a_stream_has_its_turn_when_its_token_is_due():
    assert n_steps_until_its_turn(stream_beside_a_prompt(), left_s=0.05) > 3
    assert n_steps_until_its_turn(stream_beside_a_prompt(), left_s=0.0) == 0


@pytest.mark.parametrize(("left_s", "is_taken"), [(MOVE_TO_STREAM_S / 2, False), (MOVE_TO_STREAM_S * 2, True)])
def test_a_prompt_that_is_done_is_not_taken_home_when_that_would_make_the_stream_late(left_s: float, is_taken: bool):
    run = stream_beside_a_prompt()
    assert run.engine.background.completes
    run.backend.worker.n_looks_left = 0
    n_tokens = len(run.tokens[0])
    run.now_s += run.engine.scheduler.due_in_s(run.now_s) - left_s
    run.step()
    assert run.backend.worker.is_busy is not is_taken
    assert len(run.tokens[0]) == n_tokens + 1, "nobody waits for a batch that is over"


@pytest.mark.parametrize("has_streams", [True, False])
def test_a_few_tokens_deep_in_a_prompt_go_to_the_background_beside_streams_alone(has_streams: bool):
    """There they would hold them up; alone they are done sooner without being copied."""
    run = harness(n_cells=16384, n_batch=512, background_looks=1)
    deep = [97 + at % 20 for at in range(3000)]
    run.submit(1, deep, n_predict=2)
    run.run()
    if has_streams:
        start_stream(run, 5)
    run.submit(9, [*deep, *[70] * 50], n_predict=2)
    run.step()
    assert (next(r for r in run.engine.scheduler.running if r.id == 9).skips_steps) is has_streams
    run.run()
    assert run.tokens[9] == expected_output([*deep, *[70] * 50], 2)


def start_stream(run: Harness, request_id: int) -> None:
    run.submit(request_id, [65] * 20, n_predict=120)
    while len(run.tokens.get(request_id, [])) < 3:
        run.step()


@pytest.mark.parametrize("target_itl_s", [0.005, 0.02])
def test_a_prompt_that_is_done_comes_home_though_the_stream_s_turn_is_always_near(target_itl_s: float):
    run = harness(n_cells=4096, target_itl_s=target_itl_s)
    assert target_itl_s < MOVE_TO_STREAM_S
    run.submit(0, [65] * 20, n_predict=700)
    while len(run.tokens.get(0, [])) < 3:
        run.step()
    run.submit(9, LONG, n_predict=4)
    while 9 not in run.finals:
        run.step()
    assert len(run.tokens[0]) < 100


@pytest.mark.parametrize("lane", [Lane.DEFAULT, Lane.BATCH])
def test_only_the_lowest_lanes_batch_lets_a_short_prompt_of_a_higher_lane_go_first(lane: Lane):
    """The batch takes very long, and the stream has all the time in the world."""
    run = harness(background_looks=1000)
    run.submit(0, [65] * 20, n_predict=120, lane=lane, target_itl_s=100.0)
    run.submit(1, LONG, n_predict=4, lane=lane)
    while not run.tokens.get(0) or not run.backend.worker.is_busy:
        run.step()
    run.submit(2, [66] * 30, n_predict=4, target_itl_s=100.0)
    for _ in range(3):
        run.step()
    assert bool(run.tokens.get(2)) is (lane is Lane.BATCH)
    assert run.backend.worker.is_busy
