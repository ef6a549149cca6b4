from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.budget import Budget
from localrun.engine.schedule.policy import OUTPUT_WEIGHT
from localrun.engine.schedule.scheduler import QUEUE_UPDATE_S, SHARED_PREFIX_TOKENS, Scheduler, StepPlan
from localrun.errors import QueueFull
from localrun.wire import Lane, Sampling
from tests.fakes.backend import FakeBackend

BACKEND = FakeBackend(n_cells=256, n_seqs=4, n_batch=64)
LOTS = 1 << 20


def scheduler(*, n_slots: int = 8, max_queue: int = 64, batch_rows: int = 64) -> Scheduler:
    return Scheduler(n_slots=n_slots, max_queue=max_queue, budget=Budget(batch_rows=batch_rows, mixes_rows=True))


def request(request_id: int, tokens: list[int] | int, *, n_output: int = 0, **fields: Any) -> Request:
    prompt = [7] * tokens if isinstance(tokens, int) else tokens
    sampler = BACKEND.sampler(Sampling(), ignore_eos=True)
    made = Request(request_id, list(prompt), len(prompt), 100, sampler, TextStream(()), **fields)
    for token in range(n_output):
        made.append(token, 0.0)
    return made


def run(target: Scheduler, one: Request, *, n_computed: int = 0) -> Request:
    target.submit(one)
    target.start(one, one.id, n_computed, 0.0)
    return one


def granted(plan: StepPlan) -> dict[int, int]:
    return {grant.request.id: grant.n_tokens for grant in plan.grants}


def test_decodes_come_first_and_prompts_share_what_is_left():
    plan_of = scheduler(batch_rows=64)
    run(plan_of, request(1, 100))
    run(plan_of, request(2, 10, n_output=1), n_computed=10)
    run(plan_of, request(3, 20))
    plan = plan_of.plan(n_free=LOTS)
    assert plan.grants[0].request.id == 2
    assert granted(plan) == {2: 1, 3: 20, 1: 43}
    assert (plan.n_decode_rows, plan.n_prefill_rows, plan.n_rows) == (1, 63, 64)


def test_a_plan_takes_no_more_cells_than_are_free_and_says_when_that_is_too_few():
    plan_of = scheduler()
    for request_id in (1, 2):
        run(plan_of, request(request_id, 10, n_output=1), n_computed=10)
    run(plan_of, request(3, 50))
    assert granted(plan_of.plan(n_free=12)) == {1: 1, 2: 1, 3: 10}
    enough = plan_of.plan(n_free=2)
    assert granted(enough) == {1: 1, 2: 1}
    assert not plan_of.is_short(enough)
    assert plan_of.is_short(plan_of.plan(n_free=1))


def test_a_request_that_another_engine_began_is_charged_for_what_it_computed_and_said_there():
    target = scheduler()
    target.submit(request(1, 100, n_output=3, n_cached=60, started_at_s=0.0))
    assert target.policy.service("") == 40 + 3 * OUTPUT_WEIGHT


def test_nothing_planned_is_short_only_while_somebody_runs():
    plan_of = scheduler()
    assert not plan_of.is_short(plan_of.plan(n_free=0))
    run(plan_of, request(1, 5))
    assert plan_of.is_short(plan_of.plan(n_free=0))


def test_a_request_that_comes_back_catches_up_with_all_its_tokens_as_a_prompt():
    plan_of = scheduler()
    back = run(plan_of, request(1, 10, n_output=5), n_computed=12)
    assert back.is_prefilling
    assert granted(plan_of.plan(n_free=LOTS)) == {1: 3}


def test_slots_are_given_out_and_taken_back():
    plan_of = scheduler(n_slots=2)
    one, two = run(plan_of, request(1, 5)), run(plan_of, request(2, 5))
    assert {one.slot, two.slot} == {0, 1}
    assert not plan_of.has_free_slot
    plan_of.end(one)
    assert plan_of.has_free_slot
    assert plan_of.running == [two]
    assert run(plan_of, request(3, 5)).slot == 0


def test_a_preempted_request_waits_again_and_keeps_its_tokens_and_its_first_start():
    plan_of = scheduler()
    one = request(1, 10, n_output=3)
    plan_of.submit(one)
    plan_of.start(one, 0, 4, 1.0)
    plan_of.preempt(one, 5.0)
    assert (one.seq, one.slot, one.n_computed, one.n_tokens) == (None, None, 0, 13)
    assert plan_of.waiting == [one]
    plan_of.start(one, 3, 12, 9.0)
    assert (one.started_at_s, one.n_cached, one.n_computed) == (1.0, 4, 12)


def test_cached_tokens_of_a_prompt_are_never_more_than_the_prompt():
    plan_of = scheduler()
    one = request(1, 10, n_output=3)
    plan_of.submit(one)
    plan_of.start(one, 0, 12, 1.0)
    assert one.n_cached == 10


def test_the_queue_is_full_at_its_limit():
    plan_of = scheduler(n_slots=1, max_queue=2)
    plan_of.submit(request(1, 5))
    plan_of.submit(request(2, 5))
    plan_of.check_queue()  # the first of them has a slot to go to
    plan_of.submit(request(3, 5))
    with pytest.raises(QueueFull, match=r"2 requests wait.*--max-queue") as caught:
        plan_of.check_queue()
    assert caught.value.retry_after_s == 1.0, "nothing is known yet"
    plan_of.start(plan_of.waiting[0], 0, 0, 0.0)
    with pytest.raises(QueueFull):
        plan_of.check_queue()
    plan_of.end(plan_of.running[0])
    plan_of.check_queue()


def test_one_waiting_request_is_told_in_the_singular():
    plan_of = scheduler(n_slots=1, max_queue=1)
    plan_of.submit(request(1, 5))
    plan_of.submit(request(2, 5))
    with pytest.raises(QueueFull, match=r"^1 request waits for a slot"):
        plan_of.check_queue()


def test_ending_a_waiting_request_takes_it_out_of_the_queue():
    plan_of = scheduler()
    one = request(1, 5, client="me")
    plan_of.submit(one)
    plan_of.end(one)
    assert plan_of.waiting == []
    assert plan_of.policy.service("me") == 0


def test_the_order_is_the_policy_s():
    plan_of = scheduler()
    for one in (request(1, 5, lane=Lane.BATCH), request(2, 5, lane=Lane.INTERACTIVE)):
        plan_of.submit(one)
    assert [one.id for one in plan_of.next_up(0.0)] == [2, 1]


def test_nobody_is_up_without_a_slot_to_have():
    plan_of = scheduler(n_slots=1)
    running = run(plan_of, request(1, 5, lane=Lane.DEFAULT))
    same, lower = request(2, 5, lane=Lane.DEFAULT), request(3, 5, lane=Lane.BATCH)
    for one in (same, lower):
        plan_of.submit(one)
    assert plan_of.next_up(0.0) == []
    higher = request(4, 5, lane=Lane.INTERACTIVE)
    plan_of.submit(higher)
    assert [one.id for one in plan_of.next_up(0.0)] == [4, 2, 3]
    assert plan_of.can_start(higher)
    assert not plan_of.can_start(same)
    assert plan_of.outranked(higher) == [running]
    assert plan_of.outranked(same) == []


class Fixed(Budget):
    """Gives all it has."""

    def prefill_rows(self, *, n_decode: int, depth: float, target_s: float) -> int:
        return self.batch_rows - n_decode


class Target(Budget):
    """Remembers what it was asked for, and gives one row."""

    asked_s: float | None = None

    def prefill_rows(self, *, n_decode: int, depth: float, target_s: float) -> int:
        self.asked_s = target_s
        return 1


@pytest.mark.parametrize(
    ("targets_s", "expected_s"),
    [([], 0.0), ([0.0], 0.0), ([0.1, 0.05, 0.2], 0.05), ([0.0, 0.1], 0.1), ([0.0, 0.0], 0.0)],
)
def test_the_step_s_target_is_the_shortest_of_the_streams_that_have_one(targets_s: list[float], expected_s: float):
    budget = Target(batch_rows=64, mixes_rows=True)
    plan_of = Scheduler(n_slots=8, max_queue=64, budget=budget)
    for request_id, target_s in enumerate(targets_s):
        run(plan_of, request(request_id, 10, n_output=1, target_itl_s=target_s), n_computed=10)
    run(plan_of, request(99, 50, target_itl_s=0.001))
    plan_of.plan(n_free=LOTS)
    assert budget.asked_s == expected_s, "a prompt's own target is of no account before it streams"


def test_higher_lanes_get_more_of_the_prompt_rows_and_clients_get_equal_parts():
    plan_of = scheduler(batch_rows=320)
    for request_id, client, lane in [(1, "a", Lane.INTERACTIVE), (2, "b", Lane.BATCH), (3, "b", Lane.BATCH)]:
        plan_of.submit(request(request_id, 500, client=client, lane=lane))
        plan_of.start(plan_of.waiting[0], request_id, 0, 0.0)
    plan_of.budget = Fixed(batch_rows=320, mixes_rows=False)
    assert granted(plan_of.plan(n_free=LOTS)) == {1: 256, 2: 64}


def test_service_is_the_prompt_at_the_start_without_what_was_cached_or_never_computed():
    plan_of = scheduler()
    one, other = request(1, 100, client="me"), request(2, 10, client="you")
    plan_of.submit(other)
    plan_of.submit(one)
    plan_of.start(one, 0, 30, 0.0)
    assert plan_of.policy.service("me") == 70
    plan_of.preempt(one, 1.0)
    plan_of.start(one, 0, 10, 2.0)
    assert plan_of.policy.service("me") == 70, "computed twice is served once"
    one.n_computed = 60
    plan_of.submit(request(3, 10, client="me"))
    plan_of.end(one)
    assert plan_of.policy.service("me") == 30


def test_news_of_the_queue_come_when_it_changes_and_now_and_then():
    plan_of = scheduler(n_slots=1)
    assert plan_of.queue_update(0.0) is None
    first = run(plan_of, request(1, 5))
    assert plan_of.queue_update(0.0) is None, "it never waited"
    plan_of.submit(request(2, 5))
    update = plan_of.queue_update(0.0)
    assert update is not None
    assert (update.ids, update.waits_s) == ([2], None)
    assert plan_of.queue_update(QUEUE_UPDATE_S / 2) is None
    plan_of.waits.observe_step(n_prefill=10, n_decode=1, step_s=0.1)
    update = plan_of.queue_update(QUEUE_UPDATE_S)
    assert update is not None
    assert update.waits_s is not None
    assert update.waits_s[0] > 0
    plan_of.end(first)
    assert plan_of.queue_update(QUEUE_UPDATE_S) is None, "still the same one waits"
    plan_of.start(plan_of.waiting[0], 0, 0, 1.0)
    update = plan_of.queue_update(1.0)
    assert update is not None
    assert update.ids == []
    assert plan_of.queue_update(100.0) is None


def test_a_full_queue_says_when_those_who_wait_will_have_started():
    plan_of = scheduler(n_slots=1, max_queue=3)
    run(plan_of, request(1, 5, n_output=1), n_computed=5)
    plan_of.waits.observe_step(n_prefill=10, n_decode=1, step_s=0.1)
    for request_id in (2, 3, 4):
        plan_of.submit(request(request_id, 50))
    update = plan_of.queue_update(0.0)
    with pytest.raises(QueueFull) as caught:
        plan_of.check_queue()
    assert update is not None
    assert update.waits_s is not None
    assert caught.value.retry_after_s == update.waits_s[-1] > 2 * update.waits_s[0] > 10


def test_a_deadline_is_weighed_at_the_request_s_own_place_in_the_queue():
    plan_of = scheduler(n_slots=1)
    run(plan_of, request(1, 5, client="hog", n_output=1), n_computed=5)
    plan_of.waits.observe_step(n_prefill=100, n_decode=1, step_s=0.1)
    for request_id in range(2, 12):
        plan_of.submit(request(request_id, 50, client="hog"))
    plan_of.policy.charge("hog", n_prefill=10)

    def refusal(deadline_s: float, **fields: Any) -> QueueFull | None:
        return plan_of.too_late(request(99, 50, **fields), deadline_s, lambda _: 0, now_s=0.0)

    of_the_hog = refusal(25.0, client="hog")
    assert of_the_hog is not None
    assert 25.0 < of_the_hog.retry_after_s < 11 * 10.5
    assert refusal(25.0, client="mouse") is None, "the next turn but one is its"
    assert refusal(1.0, client="mouse") is not None
    assert refusal(1.0, client="mouse", lane=Lane.INTERACTIVE) is None, "it takes the slot at once"
    own = refusal(0.01, client="mouse", lane=Lane.INTERACTIVE)
    assert own is not None
    assert own.retry_after_s == 0.0, "waiting does not make its own prompt shorter"
    assert len(plan_of.waiting) == 10


def test_without_any_experience_only_a_deadline_that_has_passed_is_refused():
    plan_of = scheduler()
    assert plan_of.too_late(request(1, 5), 0.1, lambda _: 0, now_s=0.0) is None
    assert plan_of.too_late(request(1, 5), -0.1, lambda _: 0, now_s=0.0) is not None


PREFIX = list(range(SHARED_PREFIX_TOKENS))


@pytest.mark.parametrize(
    ("n_computed", "n_matched", "prompt", "waits"),
    [
        (0, 0, [*PREFIX, 91, 92], True),
        (SHARED_PREFIX_TOKENS - 1, 0, [*PREFIX, 91, 92], True),
        # The leader has computed the common part, or the cache has it: nothing to wait for.
        (SHARED_PREFIX_TOKENS, 0, [*PREFIX, 91, 92], False),
        (0, SHARED_PREFIX_TOKENS, [*PREFIX, 91, 92], False),
        # The common part is short, or the newcomer's last token would be in it.
        (0, 0, [*PREFIX[:-1], 91, 92], False),
        (0, 0, PREFIX, False),
        (0, 0, [*PREFIX, 91], True),
    ],
)
def test_who_shares_a_long_beginning_waits_for_the_one_who_computes_it(
    n_computed: int, n_matched: int, prompt: list[int], waits: bool
):
    plan_of = scheduler()
    leader = run(plan_of, request(1, [*PREFIX, 81, 82, 83]), n_computed=n_computed)
    assert plan_of.leader(request(2, prompt), n_matched) == ((leader, SHARED_PREFIX_TOKENS) if waits else None)


def test_nobody_waits_for_a_prefix_that_it_may_not_have():
    plan_of = scheduler()
    leader = run(plan_of, request(1, [*PREFIX, 81]), n_computed=0)
    leader.namespace = b"another key's"
    assert plan_of.leader(request(2, [*PREFIX, 91]), 0) is None


def test_a_stream_that_decodes_leads_nobody():
    plan_of = scheduler()
    run(plan_of, request(1, [*PREFIX, 81], n_output=1), n_computed=SHARED_PREFIX_TOKENS + 1)
    assert plan_of.leader(request(2, [*PREFIX, 91]), 0) is None


def reusable() -> tuple[Scheduler, list[Request]]:
    """Three streams, planned once."""
    plan_of = scheduler()
    streams = [run(plan_of, request(one, 10, n_output=1), n_computed=10) for one in (1, 2, 3)]
    plan_of.plan(n_free=LOTS)
    return plan_of, streams


def decode(streams: list[Request]) -> None:
    for one in streams:
        one.n_computed += 1
        one.append(7, 0.0)


def test_the_plan_stays_while_streams_decode():
    plan_of, streams = reusable()
    plan = plan_of.reusable_plan()
    assert plan is not None
    for _ in range(3):
        decode(streams)
        assert plan_of.reusable_plan() is plan
        assert granted(plan) == granted(plan_of.plan(n_free=LOTS)) == {1: 1, 2: 1, 3: 1}
        plan = plan_of.reusable_plan()


CHANGES: dict[str, Callable[[Scheduler, list[Request]], object]] = {
    "one comes": lambda plan_of, streams: run(plan_of, request(4, 10, n_output=1), n_computed=10),
    "one ends": lambda plan_of, streams: plan_of.end(streams[0]),
    "one is preempted": lambda plan_of, streams: plan_of.preempt(streams[1], 0.0),
    "one is moved": lambda plan_of, streams: plan_of.move(streams[0], 9),
    "one is away": lambda plan_of, streams: setattr(streams[2], "skips_steps", True),
    "one is put back": lambda plan_of, streams: setattr(streams[2], "n_computed", 4),
    "one waits for its token": lambda plan_of, streams: setattr(streams[2], "n_computed", streams[2].n_tokens),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_plan_does_not_stay_when(change: str):
    plan_of, streams = reusable()
    CHANGES[change](plan_of, streams)
    assert plan_of.reusable_plan() is None


def test_a_plan_with_prompts_or_without_some_of_the_streams_is_not_kept():
    plan_of, _ = reusable()
    assert plan_of.plan(n_free=2).n_rows == 2
    assert plan_of.reusable_plan() is None
    plan_of.plan(n_free=LOTS)
    run(plan_of, request(4, 100))
    plan_of.plan(n_free=LOTS)
    assert plan_of.reusable_plan() is None
