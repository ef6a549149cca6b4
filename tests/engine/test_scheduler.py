from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.budget import Budget
from localrun.engine.detokenize import TextStream
from localrun.engine.fake import FakeBackend
from localrun.engine.request import Request
from localrun.engine.scheduler import SHARED_PREFIX_TOKENS, Scheduler, StepPlan, _divide
from localrun.wire import Lane, Sampling

BACKEND = FakeBackend(n_cells=256, n_seqs=4, n_batch=64)
LOTS = 1 << 20


def scheduler(*, n_slots: int = 8, max_queue: int = 64, batch_rows: int = 64) -> Scheduler:
    budget = Budget(target_itl_s=0.0, batch_rows=batch_rows)
    return Scheduler(n_slots=n_slots, max_queue=max_queue, budget=budget)


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


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(-5, 1000))
def test_shares_are_as_equal_as_the_wants_allow(wants: list[int], room: int):
    shares = _divide(wants, room)
    assert sum(shares) == min(sum(wants), max(0, room)), "nothing is left over while somebody wants it"
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    cut = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert not cut or max(shares) <= min(cut) + 1, "nobody gets more than somebody who wants more"


def test_decodes_come_first_and_prompts_share_what_is_left():
    plan_of = scheduler(batch_rows=64)
    run(plan_of, request(1, 100))
    run(plan_of, request(2, 10, n_output=1), n_computed=10)
    run(plan_of, request(3, 20))
    plan = plan_of.plan(n_free=LOTS, span=0)
    assert plan.grants[0].request.id == 2
    assert granted(plan) == {2: 1, 3: 20, 1: 43}
    assert (plan.n_decode_rows, plan.n_prefill_rows, plan.n_rows) == (1, 63, 64)


def test_a_plan_takes_no_more_cells_than_are_free_and_says_when_that_is_too_few():
    plan_of = scheduler()
    for request_id in (1, 2):
        run(plan_of, request(request_id, 10, n_output=1), n_computed=10)
    run(plan_of, request(3, 50))
    assert granted(plan_of.plan(n_free=12, span=0)) == {1: 1, 2: 1, 3: 10}
    enough = plan_of.plan(n_free=2, span=0)
    assert granted(enough) == {1: 1, 2: 1}
    assert not plan_of.is_short(enough)
    assert plan_of.is_short(plan_of.plan(n_free=1, span=0))


def test_nothing_planned_is_short_only_while_somebody_runs():
    plan_of = scheduler()
    assert not plan_of.is_short(plan_of.plan(n_free=0, span=0))
    run(plan_of, request(1, 5))
    assert plan_of.is_short(plan_of.plan(n_free=0, span=0))


def test_a_request_that_comes_back_catches_up_with_all_its_tokens_as_a_prompt():
    plan_of = scheduler()
    back = run(plan_of, request(1, 10, n_output=5), n_computed=12)
    assert back.is_prefilling
    assert granted(plan_of.plan(n_free=LOTS, span=0)) == {1: 3}


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
    plan_of.preempt(one)
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
    plan_of = scheduler(max_queue=2)
    plan_of.submit(request(1, 5))
    assert not plan_of.is_queue_full
    plan_of.submit(request(2, 5))
    assert plan_of.is_queue_full
    plan_of.start(plan_of.waiting[0], 0, 0, 0.0)
    assert not plan_of.is_queue_full


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
    assert [one.id for one in plan_of.order(0.0)] == [2, 1]


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
    assert plan_of.leader(request(2, prompt), n_matched) is (leader if waits else None)


def test_a_stream_that_decodes_leads_nobody():
    plan_of = scheduler()
    run(plan_of, request(1, [*PREFIX, 81], n_output=1), n_computed=SHARED_PREFIX_TOKENS + 1)
    assert plan_of.leader(request(2, [*PREFIX, 91]), 0) is None
