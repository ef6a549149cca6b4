from __future__ import annotations

from localrun.bench.chart import bars, decode_chart
from localrun.bench.decode_curve import CurvePoint


def point(streams: int, rate: float, bound: float | None = None) -> CurvePoint:
    return CurvePoint(
        streams=streams, tokens_per_s=rate, request_tokens_per_s=rate / streams, prefill_tokens_per_s=0.0,
        bound_tokens_per_s=bound,
    )  # fmt: skip


def test_bars_are_as_long_as_their_values_and_the_longest_fills_the_width():
    assert bars([("a", 4.0, "4 s"), ("long", 1.0, "1 s"), ("b", 0.25, "-")], width=8) == [
        "a     ████████ 4 s",
        "long  ██ 1 s",
        "b     ▌ -",
    ]


def test_nothing_has_no_bar():
    assert bars([("a", 0.0, "0")]) == ["a   0"]
    assert bars([]) == []


def test_a_chart_shows_every_server_the_bound_and_the_streams():
    chart = decode_chart({"us": [point(1, 100, 1000), point(8, 300, 4000)], "them": [point(1, 90), point(8, 250)]})
    for text in ("us", "them", "bound", "streams"):
        assert text in chart
    assert chart.splitlines()[-2].split() == ["1", "8"]
    assert "\x1b" not in chart
    assert all(len(line) <= 78 for line in chart.splitlines())


def test_the_better_curve_lies_higher():
    lines = decode_chart({"us": [point(1, 1000), point(2, 1000)], "them": [point(1, 10), point(2, 10)]}).splitlines()
    height = {mark: [at for at, line in enumerate(lines) if mark * 8 in line] for mark in "ox"}
    assert max(height["o"]) < min(height["x"])


def test_without_points_there_is_no_chart():
    assert decode_chart({}) == ""
    assert decode_chart({"us": []}) == ""
