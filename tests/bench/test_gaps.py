"""The silences between pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.bench.gaps import gaps_s, gaps_touching_s, longest_s

ARRIVALS = st.lists(st.floats(0, 1000), max_size=30).map(sorted)


@given(ARRIVALS)
def test_gaps_add_up_to_the_whole_time(arrivals: list[float]) -> None:
    gaps = gaps_s(arrivals)
    assert len(gaps) == max(0, len(arrivals) - 1)
    assert all(gap >= 0 for gap in gaps)
    assert sum(gaps) == pytest.approx(arrivals[-1] - arrivals[0] if arrivals else 0.0)


@given(ARRIVALS, st.floats(0, 1000), st.floats(0, 1000))
def test_a_window_has_the_gaps_of_the_whole_that_touch_it(arrivals: list[float], one: float, other: float) -> None:
    start_s, end_s = min(one, other), max(one, other)
    within = gaps_touching_s(arrivals, start_s, end_s)
    assert longest_s(within) <= longest_s(gaps_s(arrivals))
    # Together they cover whatever part of the window lies between the first and the last arrival.
    covered = min(end_s, arrivals[-1]) - max(start_s, arrivals[0]) if arrivals else 0.0
    assert sum(within) >= covered - 1e-6


def test_a_gap_that_begins_before_the_window_and_ends_after_it_counts_whole() -> None:
    assert gaps_touching_s([0.0, 1.0, 9.0, 10.0], 4.0, 5.0) == [8.0]


def test_gaps_outside_the_window_do_not_count() -> None:
    assert gaps_touching_s([0.0, 5.0, 5.5, 6.0, 20.0], 5.1, 5.9) == [0.5, 0.5]


def test_no_gap_is_no_time() -> None:
    assert longest_s([]) == 0.0
