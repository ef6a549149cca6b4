"""The place where more streams stop paying."""

from __future__ import annotations

import pytest

from localrun.bench.knee import gain_per_doubling, knee


def test_the_knee_is_the_last_number_of_streams_that_paid() -> None:
    assert knee({1: 100.0, 2: 180.0, 4: 300.0, 8: 310.0, 16: 305.0}) == 4


def test_a_curve_that_rises_to_its_end_has_no_knee_yet() -> None:
    assert knee({1: 100.0, 2: 150.0, 4: 200.0}) is None
    assert knee({1: 100.0}) is None


def test_a_falling_curve_has_its_knee_at_the_start() -> None:
    assert knee({1: 100.0, 2: 90.0, 4: 80.0}) == 1


def test_the_gain_counts_per_doubling_however_far_the_step() -> None:
    assert gain_per_doubling(1, 100.0, 2, 150.0) == pytest.approx(0.5)
    assert gain_per_doubling(1, 100.0, 8, 800.0) == pytest.approx(1.0)
    assert knee({1: 100.0, 8: 130.0}) == 1
    assert knee({1: 100.0, 8: 140.0}) is None


def test_the_order_of_measuring_does_not_matter() -> None:
    assert knee({4: 300.0, 1: 100.0, 8: 310.0, 2: 180.0}) == 4
