"""The graph: axes always, an area where there are numbers, nothing where there are none."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App, ComposeResult

from localrun.tui.rates import RateSeries, Sample
from localrun.tui.widgets.vitals import RateGraph

_BRAILLE = {chr(code) for code in range(0x2801, 0x2900)}


class _Window(App[None]):
    def __init__(self, series: RateSeries) -> None:
        super().__init__()
        self._series = series

    def compose(self) -> ComposeResult:
        yield RateGraph(self._series)


async def _drawn(desk: Any, samples: list[Sample], size: tuple[int, int] = (60, 12)) -> list[str]:
    series = RateSeries()
    for sample in samples:
        series.add(sample)
    app = _Window(series)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        lines: list[str] = desk.seen(app).split("\n")
        return lines


def _columns(lines: list[str]) -> set[int]:
    return {column for text in lines for column, character in enumerate(text) if character in _BRAILLE}


async def test_axes_without_any_sample(desk: Any) -> None:
    lines = await _drawn(desk, [])
    assert "decode tok/s" in lines[0]
    assert "prefill tok/s" in lines[0]
    assert lines[1].split() == ["10┤", "├10"]
    assert lines[-1].split() == ["-2", "min", "-1", "min", "now"]
    assert not _columns(lines)


async def test_both_axes_are_scaled_to_their_own_peak(desk: Any) -> None:
    lines = await _drawn(desk, [Sample(time / 4, 42.0, 1800.0) for time in range(480)])
    assert lines[1].split()[0].startswith("50┤")
    assert lines[1].split()[-1].endswith("├2,000")
    assert len(_columns(lines)) > 40
    assert max(len(text) for text in lines) <= 60


async def test_a_gap_stays_empty(desk: Any) -> None:
    times_s = [time / 4 for time in range(480) if not 160 < time < 320]
    columns = _columns(await _drawn(desk, [Sample(time_s, 42.0, 0.0) for time_s in times_s]))
    gaps = [column for column in range(min(columns), max(columns)) if column not in columns]
    assert 12 <= len(gaps) <= 18


@pytest.mark.parametrize("size", [(20, 12), (60, 3), (1, 1)])
async def test_no_room_is_no_graph_and_no_error(desk: Any, size: tuple[int, int]) -> None:
    assert not _columns(await _drawn(desk, [Sample(1.0, 42.0, 10.0)], size))
