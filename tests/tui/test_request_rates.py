from __future__ import annotations

from localrun.snapshot import RequestRow, RequestState
from localrun.tui.request_rates import RequestRates, sparkline
from tests.tui.conftest import snapshot_of


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
