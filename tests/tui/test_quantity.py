"""Numbers as short text: digits, units, and the edges between them."""

from __future__ import annotations

import pytest

from localrun.tui import quantity


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.0"), (8.42, "8.4"), (99.94, "99.9"), (99.96, "100"), (842.4, "842"), (12_345.0, "12.3k")],
)
def test_rate(value: float | None, text: str) -> None:
    assert quantity.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0008, "0.8 ms"), (0.012, "12 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (4.24, "4.2 s"),
        (9.96, "10 s"), (99.0, "99 s"), (185.0, "3m 05s"),
    ],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert quantity.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (-0.2, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (7620.0, "2h 07m"), (2e5, "2d")]
)
def test_age(value: float | None, text: str) -> None:
    assert quantity.age(value) == text


@pytest.mark.parametrize(
    ("value", "widest", "text"),
    [
        (None, 99_999, "–"), (0, 99_999, "0"), (1204, 99_999, "1,204"), (32_768, 9_999, "32.8k"), (999, 999, "999"),
        (100_000, 99_999, "100k"), (999_400, 99_999, "999k"), (999_600, 99_999, "1.0M"), (7_000_000_000, 99, "7.0G"),
        (2 * 10**12, 99, "2.0T"),
    ],
)  # fmt: skip
def test_count(value: int | None, widest: int, text: str) -> None:
    assert quantity.count(value, widest=widest) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0 B"), (640, "640 B"), (5_400_000, "5.4 MB"), (312_000_000, "312 MB"), (999, "999 B"),
        (1001, "1.0 KB"), (16 * 10**9, "16.0 GB"), (3 * 10**12, "3.0 TB"),
    ],
)  # fmt: skip
def test_size(value: int | None, text: str) -> None:
    assert quantity.size(value) == text


def test_percent_says_all_only_for_all_and_none_only_for_none() -> None:
    shares = [None, 0.0, 0.0001, 0.5, 0.9999, 1.0]
    assert [quantity.percent(share) for share in shares] == ["–", "0%", "1%", "50%", "99%", "100%"]
