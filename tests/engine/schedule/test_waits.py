from __future__ import annotations

import random
from typing import Any

import pytest

from localrun.engine.backend import MediaChunk
from localrun.engine.request import Request
from localrun.engine.sample.text import MediaSpan, TextStream
from localrun.engine.schedule.budget import Waits
from localrun.wire import Lane, Media, MediaKind, Sampling
from tests.engine.harness import Harness
from tests.fakes.backend import FakeBackend

BACKEND = FakeBackend(n_cells=256, n_seqs=4, n_batch=64)


def request(request_id: int, n_prompt: int, max_output: int, *, n_output: int = 0, **fields: Any) -> Request:
    sampler = BACKEND.sampler(Sampling(), ignore_eos=True)
    tokens = [1] * (n_prompt + n_output)
    return Request(request_id, tokens, n_prompt, max_output, sampler, TextStream(()), **fields)


def decoding(request_id: int, max_output: int, **fields: Any) -> Request:
    return request(request_id, 5, max_output, n_output=1, n_computed=5, **fields)


def known() -> Waits:
    """A machine that computes 100 prompt rows and 10 tokens of each stream a second; answers go to their limits."""
    waits = Waits()
    for _ in range(200):
        waits.observe_end(n_output=100, is_cut=True)
    waits.observe_step(n_prefill=10, n_decode=1, step_s=0.1)
    return waits


def predicted(waits: Waits, running: list[Request], waiting: list[Request], n_free_slots: int = 0) -> list[float]:
    result = waits.first_tokens_s(running, waiting, n_free_slots=n_free_slots, known_rows={})
    assert result is not None
    return result


def test_nothing_is_predicted_before_a_prompt_was_computed():
    waits = Waits()
    waits.observe_step(n_prefill=0, n_decode=3, step_s=0.1)
    assert waits.first_tokens_s([], [request(1, 10, 5)], n_free_slots=1, known_rows={}) is None


def test_with_a_free_slot_the_wait_is_the_prompt():
    assert predicted(known(), [], [request(1, 50, 5)], 1) == [pytest.approx(0.5)]


def test_pictures_that_must_be_encoded_are_waited_for_once():
    media = Media(MediaKind.IMAGE, "/p", b"p", width=8, height=8)
    places = [MediaSpan(10 * n, MediaChunk(10, 10, True, media, n), bytes([n])) for n in range(3)]
    one = request(1, 50, 5, chunks=tuple(places))
    assert predicted(known(), [], [one], 1) == [pytest.approx(0.5)], "nobody knows yet how long encoding takes"
    waits = known()
    waits.observe_encoding(10, 2.0)
    assert predicted(waits, [], [one], 1) == [pytest.approx(6.5)]
    assert waits.first_tokens_s([], [one], n_free_slots=1, known_rows={1: 30}) == [pytest.approx(2.3)], "two are cached"
    other = request(2, 50, 5, chunks=tuple(places[1:]))
    assert predicted(waits, [], [one, other], 2) == [pytest.approx(6.5), pytest.approx(7.0)]
    running = request(3, 50, 5, chunks=tuple(places), n_computed=10)
    assert predicted(waits, [running], [request(4, 10, 5)], 1) == [pytest.approx(4.5)]
    waits.is_encoded = lambda span: span is not places[0]
    assert predicted(waits, [], [one], 1) == [pytest.approx(2.5)]


def test_what_the_cache_has_is_not_waited_for():
    one = request(1, 50, 5)
    assert known().first_tokens_s([], [one], n_free_slots=1, known_rows={1: 10}) == [pytest.approx(0.1)]
    waits = known()
    waits.observe_start(n_tokens=100, n_cached=80)
    assert predicted(waits, [], [one], 1) == [pytest.approx(0.1)]


def test_those_ahead_take_the_slots_first():
    running = [decoding(1, 11), decoding(2, 21)]  # 1 s and 2 s to go
    waiting = [request(3, 100, 10), request(4, 100, 10), request(5, 100, 10)]
    # 3 starts at 1, has its token at 2 and ends at 3; 4 starts at 2, has its token at 3; 5 starts at 3.
    assert predicted(known(), running, waiting) == [pytest.approx(2.0), pytest.approx(3.0), pytest.approx(4.0)]


def test_prompts_share_one_machine():
    waiting = [request(number, 100, 10) for number in range(3)]
    assert predicted(known(), [], waiting, 8) == [pytest.approx(1.0), pytest.approx(2.0), pytest.approx(3.0)]
    half_done = request(9, 200, 10, n_computed=100)
    assert predicted(known(), [half_done], waiting[:1], 7) == [pytest.approx(2.0)]


def test_a_higher_lane_does_not_wait_for_slots_of_a_lower_one():
    running = [decoding(1, 100, rank=2), decoding(2, 100, rank=0)]
    waiting = [request(3, 100, 10, lane=Lane.INTERACTIVE), request(4, 100, 10, lane=Lane.INTERACTIVE)]
    first, second = predicted(known(), running, waiting)
    assert first == pytest.approx(1.0)
    assert second == pytest.approx(3.0), "the first one's end is the next free slot"


def test_answers_are_expected_to_be_as_long_as_answers_were():
    waits = known()
    for _ in range(200):
        waits.observe_end(n_output=20, is_cut=False)
    (wait_s,) = predicted(waits, [decoding(1, 10_000)], [request(2, 10, 5)])
    assert wait_s == pytest.approx(2.0 + 0.1, rel=0.01)


def test_answers_that_went_to_their_limits_say_that_limits_will_be_reached():
    waits = known()
    for _ in range(100):
        waits.observe_end(n_output=20, is_cut=True)
    (wait_s,) = predicted(waits, [decoding(1, 1001)], [request(2, 10, 5)])
    assert wait_s == pytest.approx(100.0 + 0.1, rel=0.01)


def test_newer_steps_count_more():
    waits = known()
    for _ in range(300):
        waits.observe_step(n_prefill=10, n_decode=1, step_s=0.2)
    assert predicted(waits, [], [request(1, 50, 5)], 1) == [pytest.approx(1.0, rel=0.01)]


def test_prompts_that_the_cache_had_do_not_make_whole_prompts_look_slow():
    waits = Waits()
    for _ in range(5):
        waits.observe_step(n_prefill=500, n_decode=0, step_s=1.0)
    for _ in range(50):
        waits.observe_step(n_prefill=2, n_decode=4, step_s=0.02)
    assert predicted(waits, [], [request(1, 1000, 5)], 1) == [pytest.approx(2.0, rel=0.05)]


class Timed(Harness):
    """Time passes in decodes alone, by the number of their rows. Prompts and streams are computed together."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        decode = self.backend.decode

        def timed(n_rows: int) -> None:
            decode(n_rows)
            self.now_s += 0.01 + 0.0005 * n_rows

        self.backend.decode = timed  # type: ignore[method-assign]

    def _clock(self) -> float:
        return self.now_s


def test_predictions_of_a_busy_engine_are_about_right():
    """64 requests at once on 4 slots: what each was told when half were through, against what it waited then."""
    chance = random.Random(3)
    harness = Timed(n_cells=4096, n_slots=4, n_seqs=16, ram_cache_bytes=0, max_queue=64)
    for number in range(64):
        prompt = [chance.randrange(256) for _ in range(chance.randrange(5, 60))]
        harness.submit(number, prompt, n_predict=chance.randrange(5, 60), client=f"client {number % 5}")
    told: dict[int, tuple[float, float]] = {}
    first_token_s: dict[int, float] = {}
    while not harness.engine.is_idle:
        step = harness.step()
        if step is None:
            continue
        if step.waits_s and not told and len(harness.finals) >= 32:
            assert step.queue is not None
            told = {one: (step.sent_at_s, wait_s) for one, wait_s in zip(step.queue, step.waits_s, strict=True)}
        for delta in step.deltas:
            if delta.tokens:
                first_token_s.setdefault(delta.id, step.sent_at_s)
    assert len(told) > 20
    ratios = sorted(wait_s / (first_token_s[one] - at_s) for one, (at_s, wait_s) in told.items())
    assert 0.75 < ratios[len(ratios) // 2] < 1.33
    waited = {one: first_token_s[one] - at_s for one, (at_s, _) in told.items()}
    last = max(waited, key=waited.__getitem__)
    assert told[last][1] == pytest.approx(waited[last], rel=0.25)
