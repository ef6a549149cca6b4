"""Requests that were as fast as was asked for."""

from __future__ import annotations

import pytest

from localrun.bench.goodput import goodput, is_good
from tests.bench.made_records import made_record

LIMITS = {"ttft_limit_s": 1.0, "itl_limit_s": 0.1}


def test_good_is_in_time_at_both_ends() -> None:
    assert is_good(made_record(1.0, 1.1, 1.2), **LIMITS)
    assert not is_good(made_record(1.1, 1.2, 1.3), **LIMITS)
    assert not is_good(made_record(0.5, 1.0, 1.5), **LIMITS)
    assert is_good(made_record(0.5), **LIMITS)


def test_a_request_that_failed_is_not_good_however_fast_it_was() -> None:
    assert not is_good(made_record(0.1, 0.2, problem="broke"), **LIMITS)
    assert not is_good(made_record(), **LIMITS)


def test_goodput_counts_the_good_ones_and_compares_with_all_that_were_sent() -> None:
    records = [made_record(0.5, 0.55), made_record(0.5, 0.55), made_record(3.0, 3.1), made_record(problem="refused")]
    assert goodput("", records, 10.0, **LIMITS) == {"goodput_requests_per_s": 0.2, "goodput_ratio": 0.5}
    assert goodput("open", [], 10.0, **LIMITS)["open_goodput_ratio"] == pytest.approx(0.0)
