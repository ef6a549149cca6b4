"""Tokens per second of the last second."""

from __future__ import annotations

import pytest

from localrun.server.metering.rate_window import RateWindow


def _steady(every_s: float, n_tokens: int, n_steps: int) -> RateWindow:
    window = RateWindow()
    for step in range(1, n_steps + 1):
        window.add(step * every_s, every_s, n_tokens)
    return window


@pytest.mark.parametrize("every_s", [0.001, 0.02, 0.3, 0.9, 4.0])
def test_a_steady_stream_shows_its_rate_whatever_the_step(every_s: float) -> None:
    window = _steady(every_s, 3, 2000)
    for late in (0.0, 0.5, 0.99):
        assert window.per_s((2000 + late) * every_s) == pytest.approx(3 / every_s, rel=0.01)


def test_nothing_is_zero() -> None:
    assert RateWindow().per_s(5.0) == 0.0


def test_a_stream_that_ended_falls_to_zero() -> None:
    window = _steady(0.02, 1, 100)
    assert window.per_s(2.1) > 40
    assert window.per_s(3.2) == 0.0


def test_one_quick_step_in_an_idle_second_is_not_a_high_rate() -> None:
    window = RateWindow()
    window.add(10.0, 0.01, 8)
    assert window.per_s(10.9) < 10


def test_memory_is_bounded_by_the_window() -> None:
    window = _steady(0.001, 1, 20_000)
    assert len(window._entries) <= 1002
