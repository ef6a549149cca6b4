"""Lanes, latency targets and deadlines on the whole engine."""

from __future__ import annotations

from localrun.wire import Finish, Lane, Phase
from tests.engine.harness import Harness, expected_output


def busy(*, n_slots: int = 2, lane: Lane = Lane.BATCH, **shape: int) -> Harness:
    """Every slot taken by a stream of `lane`, ids from 0 on, each of its own client."""
    harness = Harness(n_slots=n_slots, **shape)
    for request_id in range(n_slots):
        harness.submit(request_id, [request_id + 1] * 10, n_predict=30, lane=lane, client=f"client {request_id}")
    for _ in range(3):
        harness.step()
    assert len(harness.engine.scheduler.running) == n_slots
    return harness


def running(harness: Harness) -> list[int]:
    return sorted(request.id for request in harness.engine.scheduler.running)


def test_a_higher_lane_takes_the_youngest_slot_of_the_lowest_lane_and_loses_nobody_s_tokens():
    harness = busy()
    harness.submit(10, [9, 9, 9], n_predict=5, lane=Lane.INTERACTIVE)
    step = harness.step()
    assert running(harness) == [0, 10]
    assert step is not None
    assert step.queue == [1]
    assert next(delta for delta in step.deltas if delta.id == 1).phase is Phase.QUEUED
    assert harness.engine.totals.preemptions == 1
    harness.run()
    assert harness.tokens[1] == expected_output([2] * 10, 30)
    assert harness.tokens[10] == expected_output([9, 9, 9], 5)
    started = [started for step in harness.steps for started in step.started if started.id == 1]
    assert len(started) == 2
    assert harness.backend.n_open_samplers == 0


def test_who_was_preempted_comes_back_before_others_of_its_lane():
    harness = busy(n_slots=1)
    harness.submit(5, [7, 7], lane=Lane.BATCH, client="new, without any service")
    harness.submit(10, [9, 9], n_predict=3, lane=Lane.INTERACTIVE)
    while 10 not in harness.finals:
        harness.step()
    harness.step()
    assert running(harness) == [0]


def test_the_same_lane_and_lower_ones_wait():
    harness = busy(lane=Lane.DEFAULT)
    harness.submit(10, [9], lane=Lane.DEFAULT)
    harness.submit(11, [8], lane=Lane.BATCH)
    for _ in range(5):
        harness.step()
    assert running(harness) == [0, 1]
    assert harness.engine.totals.preemptions == 0


def test_what_waiting_lifted_is_not_preempted_by_the_lane_that_it_reached():
    harness = busy(n_slots=1, lane=Lane.INTERACTIVE)
    harness.submit(1, [7, 7], n_predict=50, lane=Lane.BATCH, client="job")
    harness.step()
    harness.now_s += 41.0
    while 0 not in harness.finals:
        harness.step()
    harness.step()
    assert running(harness) == [1]
    harness.submit(10, [9], lane=Lane.INTERACTIVE)
    harness.step()
    assert running(harness) == [1]


def test_cells_are_taken_from_lower_lanes_too():
    harness = Harness(n_slots=4, n_cells=256)
    harness.submit(0, [1] * 120, n_predict=30, lane=Lane.BATCH)
    for _ in range(3):
        harness.step()
    harness.submit(1, [2] * 100, n_predict=30, lane=Lane.BATCH)
    harness.step()
    assert running(harness) == [0], "there is a slot, but no room for both to go on"
    harness.submit(2, [3] * 100, n_predict=30, lane=Lane.INTERACTIVE)
    harness.step()
    assert running(harness) == [2]
    harness.run()
    for request_id, prompt in enumerate(([1] * 120, [2] * 100, [3] * 100)):
        assert harness.tokens[request_id] == expected_output(prompt, 30)


def test_nobody_is_preempted_where_that_would_not_make_room():
    harness = busy(n_slots=4, n_cells=256, n_seqs=12)
    harness.submit(10, [5] * 100, n_predict=20, lane=Lane.INTERACTIVE)
    harness.step()
    before, n_preempted = running(harness), harness.engine.totals.preemptions
    assert len(before) > 1
    assert 10 in before
    harness.submit(11, [6] * 200, n_predict=20, lane=Lane.INTERACTIVE)
    harness.step()
    assert running(harness) == before, "what the higher lane holds leaves too few cells, whoever else goes"
    assert harness.engine.totals.preemptions == n_preempted
    harness.run()
    assert harness.tokens[11] == expected_output([6] * 200, 20)


def test_many_interactive_requests_preempt_one_batch_request_a_bounded_number_of_times():
    harness = busy(n_slots=1)
    number = 10
    while 0 not in harness.finals:
        harness.submit(number, [number % 256, 3], n_predict=2, lane=Lane.INTERACTIVE, client=f"chat {number}")
        number += 1
        while number - 1 not in harness.finals:
            harness.step()
        harness.step()
    assert harness.tokens[0] == expected_output([1] * 10, 30)
    assert harness.engine.totals.preemptions <= 8


def test_a_stream_s_own_latency_holds_for_the_steps_that_it_is_in():
    def rows_beside_a_stream(target_itl_s: float | None) -> int:
        harness = Harness(n_cells=4096, n_batch=512, target_itl_s=0.0)
        harness.submit(0, [1, 2], n_predict=200, target_itl_s=target_itl_s)
        for _ in range(3):
            harness.step()
        harness.submit(1, [number % 250 for number in range(1500)], n_predict=1)
        return max(step.stats.n_prefill_rows for step in filter(None, (harness.step() for _ in range(2))))

    assert rows_beside_a_stream(None) > 400, "the engine has no limit of its own here"
    assert rows_beside_a_stream(0.0) > 400
    assert rows_beside_a_stream(0.001) <= 64


def test_a_deadline_that_cannot_be_kept_is_refused_at_once_with_the_time_to_come_back():
    harness = busy(n_slots=1, lane=Lane.DEFAULT)
    for request_id in range(1, 6):
        harness.submit(request_id, [request_id] * 10, n_predict=30, client="queued")
    harness.submit(10, [9, 9], deadline_s=0.01, client="hasty")
    step = harness.step()
    final = harness.finals[10]
    assert (final.finish, final.error_code) == (Finish.ERROR, "queue_full")
    assert final.retry_after_s is not None
    assert final.retry_after_s > 0
    assert "deadline" in (final.error_message or "")
    assert step is not None
    assert 10 not in (step.queue or [])
    harness.submit(11, [9, 9], n_predict=2, deadline_s=60.0, client="patient")
    harness.run()
    assert harness.tokens[11] == expected_output([9, 9], 2)
    assert harness.backend.n_open_samplers == 0


def test_a_full_queue_says_how_long_its_requests_will_wait():
    harness = busy(n_slots=1, lane=Lane.DEFAULT, max_queue=3)
    for request_id in range(1, 4):
        harness.submit(request_id, [request_id] * 10, n_predict=30)
    step = harness.step()
    assert step is not None
    assert step.waits_s is not None
    harness.submit(10, [9])
    harness.step()
    assert harness.finals[10].error_code == "queue_full"
    assert harness.finals[10].retry_after_s == max(step.waits_s) > min(step.waits_s)
