from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from localrun.models.download.link import backoff_s, retry_after_s
from localrun.models.download.pace import RateLimit

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("0", 0.0),
        (" 120 ", 120.0),
        ("Sat, 21 Nov 2026 12:01:30 GMT", 90.0),
        ("Sat, 21 Nov 2026 11:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, wait_s: float | None):
    assert retry_after_s(header, now=NOW) == wait_s


def test_a_date_in_another_zone():
    assert retry_after_s("Sat, 21 Nov 2026 13:00:10 +0100", now=NOW.astimezone(UTC) + timedelta(seconds=4)) == 6.0


def test_backoff_doubles_up_to_its_cap_and_is_drawn_below():
    bounds = [backoff_s(n, base_s=0.5, cap_s=30.0, draw=1.0) for n in range(1, 10)]
    assert bounds == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff_s(3, base_s=0.5, cap_s=30.0, draw=0.25) == 0.5
    assert backoff_s(10**6, base_s=0.5, cap_s=30.0, draw=1.0) == 30.0


def test_the_rate_is_kept_by_all_readers_together():
    limit = RateLimit(1000)
    waits = [limit.pay(500, now_s=0.0), limit.pay(500, now_s=0.0), limit.pay(1000, now_s=0.5)]
    assert waits == [0.5, 1.0, 1.5]


def test_idle_time_is_no_credit():
    limit = RateLimit(1000)
    limit.pay(100, now_s=0.0)
    assert limit.pay(1000, now_s=100.0) == 1.0


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 byte"):
        RateLimit(0)
