"""When it is the streams' turn, by a set clock."""

from __future__ import annotations

import math

import pytest

from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.budget import Budget
from localrun.engine.schedule.policy import AdapterRounds
from localrun.engine.schedule.scheduler import Scheduler
from localrun.wire import Sampling
from tests.fakes.backend import FakeBackend

NOW_S, STEP_S = 100.0, 0.01


def scheduler(*requests: Request) -> Scheduler:
    """These run; a step of the streams among them took 10 ms and ended now."""
    found = Scheduler(n_slots=4, max_queue=4, budget=Budget(batch_rows=64, mixes_rows=False))
    for seq, request in enumerate(requests):
        found.submit(request)
        found.start(request, seq, request.n_prompt - 1, 0.0)
    stream = request_with(target_itl_s=0.1, request_id=9)
    found.submit(stream)
    found.start(stream, 3, stream.n_prompt - 1, 0.0)
    plan = found.plan(n_free=64, left_s=0.0)
    assert plan.n_decode_rows
    found.observe(plan, depth=0.0, step_s=STEP_S, ended_at_s=NOW_S)
    found.end(stream)
    return found


def request_with(*, target_itl_s: float, n_prompt: int = 9, skips_steps: bool = False, request_id: int = 1) -> Request:
    sampler = FakeBackend(n_cells=64, n_seqs=4, n_batch=16).sampler(Sampling(), ignore_eos=True)
    request = Request(request_id, [97] * n_prompt, n_prompt, 1, sampler, TextStream(()), target_itl_s=target_itl_s)
    request.skips_steps = skips_steps
    return request


def test_streams_have_their_step_so_that_it_ends_when_their_token_is_due():
    due = scheduler(request_with(target_itl_s=0.1))
    assert due.due_in_s(NOW_S) == pytest.approx(0.1 - STEP_S)
    assert due.due_in_s(NOW_S + 0.09) == pytest.approx(0.0)
    assert due.due_in_s(NOW_S + 0.1) < 0


def test_others_get_as_long_as_a_step_takes_whatever_the_target():
    assert scheduler(request_with(target_itl_s=0.001)).due_in_s(NOW_S) == pytest.approx(STEP_S)


def test_prompts_alone_take_turns_with_the_background():
    prompt = request_with(target_itl_s=0.1)
    due = scheduler(prompt)
    prompt.n_computed = 0
    assert due.due_in_s(NOW_S) == pytest.approx(STEP_S)


def test_streams_without_a_target_are_in_no_hurry():
    assert scheduler(request_with(target_itl_s=0.0)).due_in_s(NOW_S) == math.inf


def test_who_is_away_is_due_for_nothing():
    assert scheduler(request_with(target_itl_s=0.1, skips_steps=True)).due_in_s(NOW_S) == math.inf
    assert scheduler().due_in_s(NOW_S) == math.inf


def rounds(*took_s: float, drafts_s: float = 0.0) -> AdapterRounds:
    """Rounds of a single set that took so long, and one with drafts at the end."""
    found = AdapterRounds()
    for each_s in took_s:
        found.note_only(b"", each_s, NOW_S, has_drafts=False)
    if drafts_s:
        found.note_only(b"", drafts_s, NOW_S + 1, has_drafts=True)
    return found


def test_a_round_with_drafts_does_not_say_how_long_the_next_one_takes_without():
    # It would give prompts, beside which nothing is drafted, as long a turn as the drafts took.
    found = rounds(0.03, 0.03, drafts_s=0.3)
    assert found.usual_s == found.long_s == 0.03
    assert found.ended_at_s == NOW_S + 1


def test_a_turn_of_several_sets_with_drafts_does_not_either():
    found = AdapterRounds()
    for first_s, draws in ((0.02, False), (0.2, True)):
        assert found.note(b"a", [b"b"], first_s, NOW_S, has_drafts=draws) is None
        assert found.note(b"b", [b"a"], 0.03, NOW_S, has_drafts=False) == pytest.approx(first_s + 0.03)
    assert found.usual_s == found.long_s == pytest.approx(0.05)


def test_a_step_begins_early_enough_for_all_but_the_longest_of_the_latest():
    found = rounds(0.03, 0.05, 0.5, 0.03, 0.03)
    assert found.usual_s == 0.03
    assert found.long_s == 0.05
