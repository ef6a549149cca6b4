"""Percentiles, of everything and of the last minute."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.server.jobs.generation import GROWTH, LatencyHistogram, LatencyWindow, RateWindow


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200))
def test_quantiles_are_those_of_the_samples_within_a_bucket(samples: list[float]) -> None:
    histogram = LatencyHistogram()
    for sample in samples:
        histogram.add(sample)
    ordered = sorted(samples)
    for fraction, found in zip((0.5, 0.95, 0.99), histogram.quantiles(0.5, 0.95, 0.99), strict=True):
        exact = ordered[max(1, math.ceil(fraction * len(ordered))) - 1]
        assert found == pytest.approx(exact, rel=GROWTH - 1)


def test_several_at_once_count_as_several() -> None:
    histogram = LatencyHistogram()
    histogram.add(0.1, times=99)
    histogram.add(10.0)
    assert histogram.quantiles(0.5, 1.0) == [pytest.approx(0.1, rel=0.04), pytest.approx(10.0, rel=0.04)]


def test_no_sample_is_none_and_not_zero() -> None:
    percentiles = LatencyWindow().percentiles(0.0)
    assert (percentiles.p50, percentiles.p99, percentiles.count) == (None, None, 0)


def test_the_window_forgets_after_a_minute() -> None:
    window = LatencyWindow()
    window.add(0.5, 5.0)
    window.add(50.5, 0.1)
    assert window.percentiles(50.6).count == 2
    assert window.percentiles(50.6).p99 == pytest.approx(5.0, rel=0.04)
    assert window.percentiles(70.0).count == 1
    assert window.percentiles(70.0).p99 == pytest.approx(0.1, rel=0.04)
    assert window.percentiles(200.0).count == 0


def test_news_of_two_engines_may_cross() -> None:
    window = LatencyWindow()
    for now_s in (10.1, 9.9, 10.2, 9.95):
        window.add(now_s, 0.1)
    assert window.percentiles(10.3).count == 4
    assert window.percentiles(100.0).count == 0


def test_memory_is_bounded_under_load() -> None:
    window = LatencyWindow()
    sizes = []
    for step in range(20_000):
        window.add(step * 0.01, 0.001 * (1 + step % 500))
        if (step + 1) % 10_000 == 0:
            sizes.append(len(pickle.dumps(window)))
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-12, 1e12])
def test_absurd_durations_are_kept_within_the_scale(seconds: float) -> None:
    histogram = LatencyHistogram()
    histogram.add(seconds)
    assert histogram.quantiles(0.5)[0] is not None


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
    few, many = (len(pickle.dumps(_steady(0.001, 1, n_steps))) for n_steps in (2_000, 20_000))
    assert many < 1.1 * few
