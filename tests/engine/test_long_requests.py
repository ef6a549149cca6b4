"""Requests that are longer than a stream have their cells in the pool beside the streams, and nobody else feels it."""

from __future__ import annotations

from random import Random

import pytest

from localrun.engine.cache import cache, cells
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import Finish, Lane, Submit
from tests.depth import DEPTH
from tests.engine.harness import GREEDY, Harness, expected_output
from tests.engine.speculate.drafters import any_rows
from tests.engine.test_adapters import A, B
from tests.engine.test_media import alone, asked, picture
from tests.fakes.media import FakeProjector

N_SLOTS, SHARE = 4, 128
LONG = [97 + at % 20 for at in range(200)]
# Two for which the pool has no room at once.
FIRST, SECOND = [97 + at % 19 for at in range(300)], [98 + at % 17 for at in range(300)]


def harness(**options: object) -> Harness:
    return Harness(
        **{
            "n_cells": N_SLOTS * SHARE,
            "n_slots": N_SLOTS,
            "n_batch": 64,
            "is_split": True,
            "n_background_seqs": N_SLOTS,
            "target_itl_s": 0.02,
            **options,
        }  # type: ignore[arg-type]
    )


def start_streams(run: Harness, count: int) -> None:
    for request_id in range(count):
        run.submit(request_id, [65 + request_id] * 20, n_predict=100)
    while min(len(run.tokens.get(request_id, [])) for request_id in range(count)) < 3:
        run.step()


def until_it_answers(run: Harness, request_id: int) -> None:
    while not run.tokens.get(request_id):
        run.step()


def begin_first(run: Harness, *, lane: Lane = Lane.DEFAULT, with_a_short_one: bool = False) -> None:
    run.submit(1, FIRST, n_predict=100, lane=lane)
    if with_a_short_one:
        run.submit(5, [70] * 10, n_predict=110, lane=lane)
    until_it_answers(run, 1)


def request_of(run: Harness, request_id: int):
    return next(request for request in run.engine.scheduler.running if request.id == request_id)


def test_a_prompt_that_is_longer_than_a_stream_takes_nobodys_cells():
    run = harness()
    start_streams(run, 3)
    run.submit(9, LONG, n_predict=100)
    until_it_answers(run, 9)
    assert request_of(run, 9).seq >= run.backend.n_seqs
    run.run()
    assert run.engine.totals.preemptions == 0
    assert run.tokens[9] == expected_output(LONG, 100)
    assert run.tokens[0] == expected_output([65] * 20, 100)


def test_long_and_short_streams_have_steps_in_turn():
    run = harness()
    start_streams(run, 2)
    run.submit(9, LONG, n_predict=60)
    until_it_answers(run, 9)
    before = {request_id: len(run.tokens[request_id]) for request_id in (0, 1, 9)}
    for _ in range(20):
        run.step()
    gained = {request_id: len(run.tokens[request_id]) - n_tokens for request_id, n_tokens in before.items()}
    assert max(gained.values()) - min(gained.values()) <= 1
    assert min(gained.values()) >= 9


def test_an_answer_that_outgrows_its_stream_goes_on_in_the_pool():
    run = harness()
    start_streams(run, 2)
    run.submit(9, LONG[:100], n_predict=200)
    run.run()
    assert run.engine.totals.preemptions == 0
    assert run.tokens[9] == expected_output(LONG[:100], 200)
    # The last token of an answer is never computed.
    assert run.backend.n_rows_computed == 2 * 119 + 100 + 199, "and nothing is computed twice"


def test_memory_for_an_answer_that_outgrows_its_stream_is_touched_before_it_moves(monkeypatch: pytest.MonkeyPatch):
    """By a thread, and only where there is no more room for the next token does anybody wait for it."""
    monkeypatch.setattr(cache, "QUICK_BYTES", 0)
    run = harness(n_cells=N_SLOTS * 256)
    asked_about: list[int] = []
    warm, n_tries = run.backend.warm, 2

    def watched(seq: int, n_tokens: int, *, moves: bool = False) -> bool:
        if seq >= run.backend.n_seqs and moves:
            asked_about.append(run.engine.cache.cells.span)
            return len(asked_about) > n_tries
        return warm(seq, n_tokens, moves=moves)

    monkeypatch.setattr(run.backend, "warm", watched)
    run.submit(9, LONG, n_predict=200)
    run.run()
    assert asked_about == [252, 253, 254]
    assert run.tokens[9] == expected_output(LONG, 200)
    run.engine.clear_cache(ram=True, disk=True)
    n_tries = 100
    run.submit(10, LONG, n_predict=200)
    run.run()
    assert asked_about[3:] == [252, 253, 254, 255]
    assert run.tokens[10] == expected_output(LONG, 200)


def test_an_answer_that_outgrows_its_stream_waits_for_the_batch_under_way():
    """At the end of its stream; the others go on."""
    run = harness(background_looks=10**6)
    start_streams(run, 1)
    run.submit(9, LONG[:60], n_predict=120)
    while len(run.tokens.get(9, [])) < 40:
        run.step()
        run.backend.worker.n_looks_left = 1
    run.submit(10, LONG, n_predict=4)
    for _ in range(400):
        run.step()
    assert run.backend.worker.is_busy
    assert len(run.tokens[9]) == SHARE - 60 + 1, "its cells are full, and the last token needs none yet"
    assert len(run.tokens[0]) == 100
    run.backend.background_looks = run.backend.worker.n_looks_left = 1
    run.run()
    assert run.tokens[9] == expected_output(LONG[:60], 120)
    assert run.tokens[10] == expected_output(LONG, 4)


def test_a_stream_in_the_pool_has_a_step_between_any_two_batches():
    run = harness(background_looks=1, n_batch=16)
    run.submit(1, LONG, n_predict=100)
    until_it_answers(run, 1)
    run.submit(2, LONG[::-1], n_predict=4)
    n_batches = 0
    while not run.tokens.get(2):
        n_tokens = len(run.tokens[1])
        was_busy = run.backend.worker.is_busy
        run.step()
        n_batches += run.backend.worker.is_busy and not was_busy
        assert not (run.backend.worker.is_busy and len(run.tokens[1]) > n_tokens), "their cells are being computed in"
    assert n_batches >= 10
    assert len(run.tokens[1]) >= n_batches - 1
    run.run()
    assert run.tokens[1] == expected_output(LONG, 100)


def test_all_sets_of_adapters_in_the_pool_have_a_step_between_any_two_batches():
    run = harness(background_looks=1, n_batch=16)
    for request_id, adapter in enumerate((A, B)):
        run.submit(request_id, LONG[:130], n_predict=100, adapters=[adapter])
    while not all(run.tokens.get(request_id) for request_id in range(2)):
        run.step()
    before = [len(run.tokens[request_id]) for request_id in range(2)]
    run.submit(2, LONG[::-1][:120], n_predict=4)
    n_batches = 0
    while not run.tokens.get(2):
        was_busy = run.backend.worker.is_busy
        run.step()
        n_batches += run.backend.worker.is_busy and not was_busy
    assert n_batches >= 7
    assert min(len(run.tokens[request_id]) - before[request_id] for request_id in range(2)) >= n_batches - 1


def test_the_next_turn_of_a_long_conversation_computes_what_is_new():
    run = harness()
    run.submit(1, LONG, n_predict=20)
    run.run()
    computed = run.backend.n_rows_computed
    turn = [*LONG, *run.tokens[1], *[70] * 30]
    run.submit(2, turn, n_predict=4)
    run.run()
    assert run.tokens[2] == expected_output(turn, 4)
    assert run.backend.n_rows_computed - computed == 1 + 30 + 3


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_verified_in_the_pool_too(seed: int):
    run = harness(
        ram_cache_bytes=0, speculation=lambda backend, clock: Speculation(backend, clock, policy=any_rows(seed))
    )
    answer = expected_output(LONG, 100)
    guess = [token if at % 7 else 70 for at, token in enumerate(answer)]
    run.submit(1, LONG, n_predict=100, prediction=guess)
    start_streams(run, 1)
    run.run()
    assert run.tokens[1] == answer
    assert run.tokens[0] == expected_output([65] * 20, 100)
    drafts = run.finals[1].usage.drafts
    assert sum(source.n_accepted for source in drafts) > 20
    n_steps = sum(any(delta.id == 1 and delta.tokens for delta in step.deltas) for step in run.steps)
    assert n_steps < 80


def test_who_branches_off_a_long_conversation_shares_its_cells():
    run = harness()
    run.submit(1, LONG, n_predict=200)
    until_it_answers(run, 1)
    other = [*LONG[:180], *[71] * 30]
    run.submit(2, other, n_predict=4)
    until_it_answers(run, 2)
    assert run.finals.get(2) is None
    assert run.engine.cache.cells.n_shared == 180
    run.run()
    assert run.tokens[2] == expected_output(other, 4)


def test_a_long_conversation_leaves_the_pool_for_another_one_and_comes_back_without_computing():
    run = harness()
    pool = run.engine.cache.cells.pool
    run.submit(1, LONG, n_predict=20)
    run.run()
    assert pool.n_used == 219, "nobody attends over it meanwhile"
    other = [*LONG[:60], *[71] * 150]
    run.submit(2, other, n_predict=20)
    until_it_answers(run, 2)
    assert pool.span == pool.n_used == len(other)
    turn = [*LONG, *run.tokens[1], *[70] * 10]
    run.run()
    computed = run.backend.n_rows_computed
    run.submit(3, turn, n_predict=1)
    run.run()
    assert run.tokens[3] == expected_output(turn, 1)
    assert run.finals[3].usage.n_cached == 219
    assert run.backend.n_rows_computed - computed == len(turn) - 219
    assert run.finals[2].usage.n_cached == 60


def test_on_a_gpu_long_conversations_stay_in_the_pool():
    run = harness()
    run.backend.n_gpu_layers = 1
    run.submit(1, LONG, n_predict=20)
    run.run()
    run.submit(2, LONG[::-1], n_predict=4)
    until_it_answers(run, 2)
    assert run.engine.cache.cells.pool.n_used > 400


def test_a_long_conversation_that_ends_leaves_the_pool_while_another_one_answers():
    run = harness()
    pool = run.engine.cache.cells.pool
    run.submit(1, LONG, n_predict=20)
    run.submit(2, LONG[::-1], n_predict=200)
    while 1 not in run.finals:
        run.step()
    for _ in range(10):
        run.step()
    assert 2 not in run.finals
    assert pool.n_used <= 200 + len(run.tokens[2])


def test_a_short_request_takes_what_it_can_of_a_long_one():
    run = harness(ram_cache_bytes=0)
    run.submit(1, LONG, n_predict=20)
    run.run()
    computed = run.backend.n_rows_computed
    short = [*LONG[:60], 70, 71]
    run.submit(2, short, n_predict=4)
    run.run()
    assert run.tokens[2] == expected_output(short, 4)
    assert run.backend.n_rows_computed - computed == 2 + 3


def test_the_span_of_the_pool_shrinks_when_those_below_are_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cells, "COMPACT_CELLS", 20)
    monkeypatch.setattr(cells, "MOVE_TOKENS", 16)
    run = harness(ram_cache_bytes=0)
    run.submit(1, LONG, n_predict=5)
    run.run()
    run.submit(2, LONG[::-1], n_predict=100)
    until_it_answers(run, 2)
    pool = run.engine.cache.cells.pool
    assert pool.span > 400
    run.engine.clear_cache(ram=True, disk=True)
    run.run()
    assert pool.span <= 1.5 * pool.n_used + 20
    assert run.tokens[2] == expected_output(LONG[::-1], 100)


def test_who_finds_no_room_in_the_pool_waits_and_the_short_ones_pass():
    run = harness()
    begin_first(run)
    run.submit(2, SECOND, n_predict=10)
    run.submit(3, [70] * 10, n_predict=10)
    while 3 not in run.finals:
        run.step()
    assert [request.id for request in run.engine.scheduler.waiting] == [2]
    assert 1 not in run.finals
    run.run()
    assert run.engine.totals.preemptions == 0
    assert run.tokens[1] == expected_output(FIRST, 100)
    assert run.tokens[2] == expected_output(SECOND, 10)


def test_a_lower_lane_gives_its_cells_in_the_pool():
    run = harness()
    begin_first(run, lane=Lane.BATCH, with_a_short_one=True)
    run.submit(2, SECOND, n_predict=10, lane=Lane.INTERACTIVE)
    while 2 not in run.finals:
        run.step()
    assert 1 not in run.finals
    run.run()
    assert run.engine.totals.preemptions == 1, "the short one has cells of its own"
    assert run.tokens[1] == expected_output(FIRST, 100)
    assert run.tokens[2] == expected_output(SECOND, 10)


def test_who_gives_its_cells_to_a_batch_is_not_held_by_it():
    run = harness(n_batch=16, background_looks=1)
    first, second = [97 + at % 19 for at in range(384)], [98 + at % 17 for at in range(127)]
    run.submit(1, first, n_predict=100, lane=Lane.BATCH)
    until_it_answers(run, 1)
    run.submit(2, second, n_predict=1, lane=Lane.INTERACTIVE)
    run.run()
    assert run.engine.totals.preemptions == 1
    assert run.tokens[1] == expected_output(first, 100)
    assert run.tokens[2] == expected_output(second, 1)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_scores_of_a_long_prompt_survive_that_it_leaves_the_pool_while_a_batch_is_computed(is_cancelled: bool):
    run = harness(background_looks=10**6)
    run.engine.submit(
        Submit(id=1, sampling=GREEDY, n_predict=1, logprobs=True, scores_prompt=True, lane=Lane.BATCH), list(LONG)
    )
    for _ in range(4):
        run.step()
    run.submit(2, LONG[::-1], n_predict=4)
    while not run.backend.worker.is_busy:
        run.step()
    assert request_of(run, 1).is_held
    if is_cancelled:
        run.engine.cancel(1)
    else:
        for request_id in range(10, 14):
            run.submit(request_id, [request_id] * 5, n_predict=4, lane=Lane.INTERACTIVE)
        run.step()
        assert run.engine.totals.preemptions > 0
    run.step()
    run.backend.background_looks = run.backend.worker.n_looks_left = 1
    run.run()
    assert run.tokens[2] == expected_output(LONG[::-1], 4)
    if is_cancelled:
        return
    assert run.finals[1].finish is Finish.LENGTH
    said = [delta.scores for step in run.steps for delta in step.deltas if delta.id == 1 and delta.scores is not None]
    assert [score.token for scores in said for score in scores.tokens] == LONG


def test_nobody_loses_a_slot_for_one_that_has_no_room_in_the_pool():
    run = harness()
    begin_first(run, lane=Lane.INTERACTIVE)
    for request_id in range(10, 13):
        run.submit(request_id, [request_id] * 20, n_predict=100, lane=Lane.BATCH)
    run.submit(2, SECOND, n_predict=10, lane=Lane.INTERACTIVE)
    run.run()
    assert run.engine.totals.preemptions <= 1
    assert run.tokens[2] == expected_output(SECOND, 10)


def test_a_lower_lane_gives_all_of_the_pool():
    run = harness()
    second = [98 + at % 17 for at in range(490)]
    begin_first(run, lane=Lane.BATCH, with_a_short_one=True)
    run.submit(2, second, n_predict=4, lane=Lane.INTERACTIVE)
    while 2 not in run.finals:
        run.step()
    assert len(run.tokens[1]) < 30
    assert run.tokens[2] == expected_output(second, 4)


@pytest.mark.parametrize("n_tokens", [150, 100])
def test_the_longest_request_has_its_turn_however_many_others_want_the_pool(n_tokens: int):
    """Longer than a stream, or computed in the background until they have one."""
    run = harness(n_batch=16)
    longest, others = [97 + at % 19 for at in range(440)], 0
    for at in range(4000):
        if at == 20:
            run.submit(1000, longest, n_predict=4)
        known = [*run.engine.scheduler.running, *run.engine.scheduler.waiting]
        if sum(request.id != 1000 for request in known) < 3:
            others += 1
            run.submit(others, [66 + others % 150] + [98 + at % 17 for at in range(n_tokens)], n_predict=20)
        run.step()
        if run.tokens.get(1000):
            break
    assert run.tokens[1000] == expected_output(longest, 4)[: len(run.tokens[1000])]
    assert others < 20


def test_one_at_the_end_of_its_stream_stays_held_when_a_batch_is_given_up():
    run = harness(background_looks=10**6)
    for request_id in range(2):
        run.submit(request_id, [65 + request_id] * 20, n_predict=100)
    run.submit(9, LONG[:60], n_predict=120)
    while len(run.tokens.get(9, [])) < 40:
        run.step()
    run.submit(10, LONG, n_predict=4, lane=Lane.BATCH)
    while not request_of(run, 9).is_held:
        run.step()
    run.submit(11, [66] * 5, n_predict=4, lane=Lane.INTERACTIVE)
    run.step()
    assert not run.backend.worker.is_busy, "for nobody but the one whose slot was taken"
    assert request_of(run, 9).is_held
    run.backend.background_looks = 1
    run.run()
    assert run.engine.totals.preemptions == 1
    assert run.tokens[9] == expected_output(LONG[:60], 120)


def test_a_picture_that_is_larger_than_a_stream_may_end_a_prompt():
    run = Harness(
        n_cells=256, n_slots=8, n_batch=64, is_split=True, n_background_seqs=8,
        projector=FakeProjector(is_causal=False, has_ends=False),
    )  # fmt: skip
    prompt = asked("what is this?", picture("one", 8, 6))
    run.submit(1, prompt, n_predict=8)
    run.run()
    assert run.tokens[1] == alone(run, prompt, 8)


@pytest.mark.parametrize("ram_cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("seed", range(3 * DEPTH))
def test_requests_of_all_lengths_answer_as_if_alone(seed: int, ram_cache_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Nobody starves, and every step the books are compared with the cells."""
    monkeypatch.setattr(cells, "COMPACT_CELLS", 20)
    monkeypatch.setattr(cells, "MOVE_TOKENS", 16)
    random = Random(f"{seed} {ram_cache_bytes}")
    run = harness(
        ram_cache_bytes=ram_cache_bytes, background_looks=random.randrange(1, 6), n_batch=random.choice([16, 64])
    )
    beginnings = [[letter] * random.randrange(10, 300) for letter in b"xyz"]
    asked: dict[int, tuple[list[int], int]] = {}
    cancelled = set()
    for request_id in range(30):
        prompt = random.choice(beginnings)[: random.randrange(1, 300)] + [66 + request_id] * random.randrange(1, 60)
        if random.random() < 0.3 and run.tokens:
            before = random.choice([known for known in run.tokens if known in asked])
            prompt = [*asked[before][0], *run.tokens[before], 65]
        n_predict = random.randrange(1, 120)
        prompt = prompt[: N_SLOTS * SHARE - n_predict - 1]
        asked[request_id] = prompt, n_predict
        run.submit(request_id, prompt, n_predict=n_predict, lane=random.choice(list(Lane)))
        for _ in range(random.randrange(0, 40)):
            run.step()
        if random.random() < 0.2:
            victim = random.choice(list(asked))
            if victim not in run.finals:
                run.engine.cancel(victim)
                cancelled.add(victim)
        if random.random() < 0.1:
            run.engine.clear_cache(ram=True, disk=False)
    run.run()
    for request_id, (prompt, n_predict) in asked.items():
        if request_id in cancelled:
            continue
        assert run.finals[request_id].finish is Finish.LENGTH
        assert run.tokens[request_id] == expected_output(prompt, n_predict)
