"""Arrivals of an open loop."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.bench.arrivals import arrivals_s
from localrun.bench.gaps import gaps_s


@settings(max_examples=50)
@given(st.floats(0.1, 50), st.floats(0.1, 20), st.floats(0.2, 5), st.integers(0, 2**31))
def test_times_ascend_within_the_window_and_repeat_with_the_seed(
    rate_per_s: float, seconds: float, burstiness: float, seed: int
) -> None:
    times = arrivals_s(rate_per_s=rate_per_s, seconds=seconds, burstiness=burstiness, seed=seed)
    assert times == sorted(times)
    assert all(0 <= at < seconds for at in times)
    assert times == arrivals_s(rate_per_s=rate_per_s, seconds=seconds, burstiness=burstiness, seed=seed)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_the_mean_is_the_rate_and_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = gaps_s(arrivals_s(rate_per_s=10.0, seconds=2000.0, burstiness=burstiness, seed=1))
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    # Of a Gamma distribution the coefficient of variation is 1 / sqrt(shape).
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_another_seed_gives_other_times() -> None:
    assert arrivals_s(rate_per_s=5, seconds=5, seed=1) != arrivals_s(rate_per_s=5, seconds=5, seed=2)
