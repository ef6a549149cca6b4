"""A step that takes long says what it took long for, whatever that is, and the longest of a minute is told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localrun.engine.backend import DecodeFailed
from localrun.engine.report import StepTimes, Totals
from localrun.wire import LongStep
from tests.engine.harness import Harness
from tests.fakes.media import FakeProjector

LONG_S = 0.2
PLACES: dict[str, Callable[[Harness], tuple[Any, str]]] = {
    "messages": lambda h: (h.engine._admission, "take"),
    "admit": lambda h: (h.engine.cache, "acquire"),
    "restore": lambda h: (h.engine.cache, "restore_next"),
    "save": lambda h: (h.engine.cache, "save_next"),
    "move": lambda h: (h.engine.cache, "compact"),
    "background": lambda h: (h.engine, "_encode"),
    "plan": lambda h: (h.engine.cache, "make_room"),
    "drafts": lambda h: (h.engine._speculation, "extend"),
    "decode": lambda h: (h.backend, "decode"),
    "tokens": lambda h: (h.engine._answers, "extend"),
    "report": lambda h: (h.engine.scheduler, "queue_update"),
}


def longest(harness: Harness) -> LongStep:
    return max((step.long_step for step in harness.steps if step.long_step is not None), key=lambda one: one.seconds)


@pytest.mark.parametrize("part", PLACES)
def test_a_long_step_names_the_part_that_took_long(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(projector=FakeProjector())
    owner, name = PLACES[part](harness)
    usual, left = getattr(owner, name), [3]

    def slow(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            harness.now_s += LONG_S
        return usual(*arguments, **more)

    monkeypatch.setattr(owner, name, slow)
    for request_id in (1, 2, 3):
        harness.submit(request_id, f"prompt {request_id}", n_predict=12)
        harness.step()
    harness.run()
    assert left[0] <= 0, "this part was never reached"
    step = longest(harness)
    assert step.seconds > LONG_S
    assert max(step.parts, key=step.parts.__getitem__) == part
    assert step.parts[part] > LONG_S
    assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_the_start_of_the_backgrounds_batch_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(n_cells=1024, n_background_seqs=2, is_split=True)
    background = harness.engine.background
    begin = background.begin

    def slow(*arguments: Any, **more: Any) -> bool:
        harness.now_s += LONG_S
        return begin(*arguments, **more)

    monkeypatch.setattr(background, "begin", slow)
    harness.submit(1, "a long prompt " * 12, n_predict=2)
    harness.run()
    assert longest(harness).parts["background"] > LONG_S


def test_a_step_that_failed_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    decode, failures = harness.backend.decode, ["once"]

    def fail(*arguments: Any) -> None:
        if failures:
            failures.pop()
            harness.now_s += LONG_S
            raise DecodeFailed("for a test", is_fatal=False)
        decode(*arguments)

    monkeypatch.setattr(harness.backend, "decode", fail)
    harness.submit(1, "prompt", n_predict=2)
    harness.run()
    assert longest(harness).parts["decode"] > LONG_S


def test_rows_and_streams_are_those_of_the_long_step() -> None:
    harness = Harness(n_batch=16)
    harness.submit(1, "short", n_predict=20)
    harness.step()
    harness.now_s += 60.0  # a minute in which there was no step
    harness.submit(2, "a prompt of more than one batch " * 3, n_predict=2)
    harness.step()
    told = harness.steps[-1].long_step
    assert told is not None, "the first step of a minute is its longest"
    assert (told.n_running, told.n_decode_rows) == (2, 1)
    assert told.n_prefill_rows == 15


def test_only_a_longer_step_is_told_of_until_the_minute_is_over() -> None:
    clock = [30.0]
    times = StepTimes(lambda: clock[0], lambda: clock[0] / 2)

    def step(seconds: float) -> LongStep | None:
        times.begin()
        clock[0] += seconds
        times.lap("decode")
        times.end(Totals(n_decode_rows=1), 1)
        return times.take()

    first = step(0.02)
    assert first is not None
    assert (first.seconds, first.cpu_s) == (pytest.approx(0.02), pytest.approx(0.01))
    assert step(0.01) is None
    assert step(0.03) is not None
    assert step(0.02) is None
    clock[0] = 60.0
    assert step(0.01) is not None


@pytest.mark.parametrize(("n_running", "seconds", "is_told"), [(0, 0.004, False), (0, LONG_S, True), (1, 0.004, True)])
def test_a_step_that_computed_nothing_is_told_of_if_somebody_may_have_waited(
    n_running: int, seconds: float, is_told: bool
) -> None:
    clock = [30.0]
    times = StepTimes(lambda: clock[0], lambda: 0.0)
    times.begin()
    clock[0] += seconds
    times.lap("messages")
    times.end(Totals(), n_running)
    assert (times.take() is not None) == is_told


def test_time_without_anything_to_do_does_not_count() -> None:
    harness = Harness()
    harness.submit(1, "prompt", n_predict=2)
    harness.run()
    harness.now_s += 10.0
    harness.submit(2, "another", n_predict=2)
    harness.run()
    assert longest(harness).seconds < 1.0
