"""The graph's two minutes: what is kept, averaged and left open."""

from __future__ import annotations

import pytest

from localrun.snapshot import RequestRow, RequestState
from localrun.tui.rates import WINDOW_S, RateSeries, RequestRates, Sample, axis_top, sparkline
from tests.tui.conftest import snapshot_of


def _series(times_s: list[float]) -> RateSeries:
    series = RateSeries()
    for time_s in times_s:
        series.add(Sample(time_s, time_s, 2 * time_s))
    return series


def test_empty() -> None:
    assert RateSeries().segments(60) == []
    assert RateSeries().peaks() == (0.0, 0.0)


def test_columns_are_averages_and_at_most_as_many_as_asked() -> None:
    series = _series([time / 4 for time in range(4 * 120)])
    (segment,) = series.segments(60)
    assert 58 <= len(segment.ages_s) <= 61
    # Column width 2 s: the first column holds 0, 0.25 ... 1.75.
    assert segment.decode_tokens_per_s[0] == pytest.approx(0.875)
    assert segment.prefill_tokens_per_s[0] == pytest.approx(1.75)
    assert segment.ages_s == sorted(segment.ages_s)
    assert segment.ages_s[-1] <= 0


def test_a_column_keeps_its_height_while_it_moves_left() -> None:
    times_s = [time / 4 for time in range(400)]
    before = _series(times_s).segments(60)[0].decode_tokens_per_s
    after = _series([*times_s, 100.0, 100.25, 100.5]).segments(60)[0].decode_tokens_per_s
    assert after[: len(before) - 1] == before[:-1]


def test_only_the_window_is_kept() -> None:
    series = _series([0.0, 1.0, WINDOW_S + 1.5])
    assert series.peaks() == (WINDOW_S + 1.5, 2 * (WINDOW_S + 1.5))
    assert sum(len(segment.ages_s) for segment in series.segments(1000)) == 1


def test_a_gap_is_left_open() -> None:
    series = _series([0.0, 0.25, 0.5, 20.0, 20.25])
    first, second = series.segments(1000)
    assert [len(first.ages_s), len(second.ages_s)] == [3, 2]
    assert first.ages_s[-1] == pytest.approx(-19.75)


def test_a_clock_set_back_a_little_is_waited_for_and_one_far_back_starts_again() -> None:
    assert _series([500.0, 501.0, 500.5, 501.2]).peaks() == (501.2, 1002.4)
    assert _series([500.0, 501.0, 3.0]).peaks() == (3.0, 6.0)


@pytest.mark.parametrize(("peak", "top"), [(0, 10), (10, 10), (10.1, 20), (42, 50), (84, 100), (401, 500), (8001, 1e4)])
def test_axis_top(peak: float, top: float) -> None:
    assert axis_top(peak) == top
    assert axis_top(peak) >= peak


def _row(name: str, rate: float | None, state: RequestState = RequestState.DECODE) -> RequestRow:
    return RequestRow(id=name, client="c", api="a", model="m", lane="default", state=state, tokens_per_s=rate)


def test_one_sample_a_second_is_kept():
    rates = RequestRates()
    for quarter in range(12):
        rates.add(snapshot_of(_row("a", float(quarter)), time_s=100 + quarter / 4))
    assert rates.of("a") == (0.0, 4.0, 8.0)
    assert rates.top() == 8.0


def test_what_left_the_snapshot_is_forgotten_and_what_ended_stops():
    rates = RequestRates()
    rates.add(snapshot_of(_row("a", 1.0), _row("b", 2.0), time_s=1.0))
    rates.add(snapshot_of(_row("a", 1.0), _row("b", 9.0, RequestState.DONE), time_s=2.0))
    assert (rates.of("a"), rates.of("b")) == ((1.0, 1.0), (2.0,))
    rates.add(snapshot_of(time_s=3.0))
    assert (rates.of("a"), rates.top()) == ((), 0.0)


def test_a_clock_that_is_set_back_does_not_stop_it():
    rates = RequestRates()
    rates.add(snapshot_of(_row("a", 1.0), time_s=1000.0))
    rates.add(snapshot_of(_row("a", 2.0), time_s=10.0))
    assert rates.of("a") == (1.0, 2.0)


def test_a_sparkline_is_drawn_against_a_top_and_shows_the_latest():
    assert sparkline([0.0, 5.0, 10.0], 10, 10.0) == "▁▅█"
    assert sparkline([0.0, 5.0, 10.0], 2, 20.0) == "▃▅"
    assert sparkline([], 5, 0.0) == ""
