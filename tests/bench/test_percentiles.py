"""Percentiles against numpy's, and their order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.bench.percentiles import percentile, summary

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_numpy_s_and_lies_within_the_values(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)
    assert min(values) <= found <= max(values)


@given(VALUES)
def test_higher_percentiles_are_not_lower(values: list[float]) -> None:
    reported = summary("ttft", values)
    assert list(reported) == ["ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "ttft_max_s"]
    assert list(reported.values()) == sorted(reported.values())
    assert reported["ttft_max_s"] == max(values)


def test_the_median_of_two_lies_between_them() -> None:
    assert percentile([3.0, 1.0], 50) == 2.0


def test_nothing_measured_is_nothing_reported() -> None:
    assert summary("itl", []) == {}
