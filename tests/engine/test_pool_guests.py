"""While a long request answers in the pool, the others have their steps with it; each step reads the weights once."""

from __future__ import annotations

from random import Random

import pytest

from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_output
from tests.engine.test_adapters import A
from tests.engine.test_long_requests import LONG, SHARE, harness, request_of, start_streams, until_it_answers

N_SLOTS = 16  # so the pool is far from full


def roomy(**options: object) -> Harness:
    return harness(**{"n_cells": N_SLOTS * SHARE, "n_slots": N_SLOTS, "n_background_seqs": N_SLOTS, **options})


def begin(run: Harness, n_streams: int, *, n_predict: int = 300) -> None:
    """Streams, and a long request that answers."""
    for request_id in range(n_streams):
        run.submit(request_id, [65 + request_id] * 20, n_predict=n_predict)
    while min(len(run.tokens.get(request_id, [])) for request_id in range(n_streams)) < 3:
        run.step()
    run.submit(9, LONG, n_predict=n_predict)
    until_it_answers(run, 9)


def in_pool(run: Harness) -> set[int]:
    return {request.id for request in run.engine.scheduler.running if request.seq >= run.backend.n_seqs}


def n_steps_for(run: Harness, request_ids: list[int], n_tokens: int) -> int:
    """Steps until each has so many tokens more."""
    wanted = {request_id: len(run.tokens[request_id]) + n_tokens for request_id in request_ids}
    n_steps = 0
    while any(len(run.tokens[request_id]) < count for request_id, count in wanted.items()):
        run.step()
        n_steps += 1
    return n_steps


def test_streams_and_a_long_request_have_their_steps_together():
    run = roomy()
    begin(run, 2)
    for _ in range(10):
        run.step()
    assert in_pool(run) == {0, 1, 9}
    assert n_steps_for(run, [0, 1, 9], 20) == 20, "each step has a token for everybody"
    run.run()
    assert run.tokens == {
        9: expected_output(LONG, 300), 0: expected_output([65] * 20, 300), 1: expected_output([66] * 20, 300),
    }  # fmt: skip
    assert run.engine.totals.preemptions == 0


def test_a_new_prompt_sends_them_home_and_holds_nobody_up():
    run = roomy(background_looks=1)
    begin(run, 2)
    while in_pool(run) != {0, 1, 9}:
        run.step()
    run.submit(5, [70 + at % 9 for at in range(100)], n_predict=2)
    run.step()
    assert in_pool(run) == {9, 5}
    while not run.tokens.get(5):
        run.step()
        assert not any(request_of(run, request_id).is_held for request_id in (0, 1))
    run.run()
    assert run.tokens[0] == expected_output([65] * 20, 300)


def test_they_go_home_when_the_long_request_has_ended():
    run = roomy()
    begin(run, 2)
    while in_pool(run) != {0, 1, 9}:
        run.step()
    run.engine.cancel(9)
    for _ in range(5):
        run.step()
    assert in_pool(run) == set()
    run.run()
    assert run.tokens[1] == expected_output([66] * 20, 300)


def test_where_one_has_to_stay_all_do():
    run = roomy()
    begin(run, 1)
    run.submit(5, [70] * 10, n_predict=12)
    until_it_answers(run, 5)
    for _ in range(10):
        run.step()
    assert in_pool(run) == {9}, "it would be gone before the copy had paid"
    while 5 not in run.finals:
        run.step()
    for _ in range(10):
        run.step()
    assert in_pool(run) == {0, 9}


def test_those_with_other_adapters_keep_to_themselves():
    run = roomy()
    begin(run, 1)
    run.submit(5, [70] * 10, n_predict=200, adapters=[A])
    until_it_answers(run, 5)
    for _ in range(10):
        run.step()
    assert in_pool(run) == {0, 9}


def test_where_the_pool_is_full_nobody_comes():
    run = harness()
    start_streams(run, 2)
    run.submit(9, [97 + at % 20 for at in range(400)], n_predict=100)
    until_it_answers(run, 9)
    for _ in range(10):
        run.step()
    assert in_pool(run) == {9}


@pytest.mark.parametrize("seed", range(6 * DEPTH))
def test_with_guests_every_answer_is_what_it_is_alone(seed: int):
    random, run = Random(seed), roomy()
    prompts: dict[int, tuple[list[int], int]] = {}
    for request_id in range(24):
        length = random.choice((5, 20, 60, 140, 200))
        prompts[request_id] = [97 + random.randrange(20) for _ in range(length)], random.choice((3, 40, 150))
    waiting = list(prompts)
    while waiting or not run.engine.is_idle:
        if waiting and random.random() < 0.05:
            request_id = waiting.pop(0)
            run.submit(request_id, prompts[request_id][0], n_predict=prompts[request_id][1])
        run.step()
        run.check()
    for request_id, (prompt, n_predict) in prompts.items():
        assert run.tokens[request_id] == expected_output(prompt, n_predict)
