"""What a server's answer means, and when to try again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from localrun.errors import DownloadFailed, SourceChanged, SourceRefused
from localrun.models.download.fetch import RateLimit
from localrun.models.download.journal import Range
from localrun.models.download.ranges import (
    PassingFailure,
    RangeAnswer,
    answer_of,
    backoff_s,
    retry_after_s,
    strong_etag,
)

ASKED = Range(100, 200)


def answered(status: int, **headers: str) -> RangeAnswer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return answer_of(status, named, ASKED, name="fox.gguf", host="hub", now=datetime(2026, 11, 21, tzinfo=UTC))


def test_a_range_and_a_whole():
    assert answered(206, content_range="bytes 100-199/1000", etag='"v"') == RangeAnswer(100, 1000, '"v"')
    assert answered(200, content_length="1000") == RangeAnswer(0, 1000, "")
    assert answered(200) == RangeAnswer(0, None, "")


@pytest.mark.parametrize("said", ["", "bytes 0-99/1000", "bytes */1000", "pages 100-199/1000"])
def test_a_range_that_was_not_asked_for_is_not_taken(said: str):
    with pytest.raises(PassingFailure):
        answered(206, content_range=said)


def test_passing_failures_carry_what_the_server_asks_for():
    with pytest.raises(PassingFailure) as failure:
        answered(429, retry_after="7")
    assert failure.value.wait_s == 7


def test_the_rest_is_final():
    with pytest.raises(SourceChanged):
        answered(416)
    with pytest.raises(SourceRefused, match=r"status 404 .Entry not found."):
        answered(404, x_error_message="Entry not found")
    with pytest.raises(SourceRefused):
        answered(304)
    with pytest.raises(DownloadFailed, match="compressed"):
        answered(200, content_encoding="gzip")


@pytest.mark.parametrize(
    ("header", "etag"), [('"a"', '"a"'), ('W/"a"', ""), (None, ""), ("a", ""), ('""', ""), (' "a b" ', '"a b"')]
)
def test_only_a_strong_etag_names_bytes(header: str | None, etag: str):
    assert strong_etag(header) == etag


def test_a_reason_of_the_server_is_bounded_and_printable():
    with pytest.raises(SourceRefused) as refusal:
        answered(403, x_error_message="x" * 5000)
    assert len(refusal.value.message) < 500
    with pytest.raises(SourceRefused) as refusal:
        answered(403, x_error_message="\x1b[31mred")
    assert "\x1b" not in refusal.value.message


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
