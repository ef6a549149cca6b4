from __future__ import annotations

import inspect
import math

import pytest

from bench.tables import bars, note_lines
from localrun.bench.metrics import CurvePoint
from localrun.bench.report import (
    aligned,
    cost_per_million_tokens,
    curve_tables,
    decode_chart,
    price_per_hour,
    shown,
    table,
)
from localrun.bench.results import Metrics, RunResult, StreamRecord, Target
from localrun.bench.streams import CUT_SHORT
from localrun.bench.workloads import WORKLOADS
from localrun.errors import BadRequest
from tests.bench.made_records import made_record


def result(metrics: Metrics, *problems: str, note: str = "") -> RunResult:
    records = [made_record(problem=problem) for problem in problems]
    target = Target("t", "http://127.0.0.1:1", "m")
    return RunResult(workload="stall", target=target, parameters={}, metrics=metrics, records=records, note=note)


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("decode_tokens_per_s", 123.456, "123.5/s"),
        ("ttft_p50_s", 0.01234, "12.3 ms"),
        ("ttft_p50_s", 12.345, "12.35 s"),
        ("rss_bytes", 123_456_789.0, "123 MB"),
        ("failed_count", 3.0, "3"),
        ("completion_ratio", 0.987654, "0.988"),
    ],
)
def test_numbers_have_their_unit(metric: str, value: float, text: str) -> None:
    assert shown(metric, value) == text


def test_rounds_are_shown_as_median_and_spread() -> None:
    text = table([result({"longest_gap_s": gap}) for gap in (0.3, 0.1, 0.2)], WORKLOADS)
    assert text.startswith("stall: ")
    assert "200.0 ms  (100.0 ms to 300.0 ms)" in text


def test_the_headline_is_shown_and_the_rest_on_demand() -> None:
    results = [result({"tpot_p50_s": 1.0, "longest_gap_s": 0.1, "completion_ratio": 1.0})]
    brief, whole = table(results, WORKLOADS), table(results, WORKLOADS, is_verbose=True)
    assert "tpot_p50_s" not in brief
    assert "completion_ratio" in brief
    assert whole.index("longest_gap_s") < whole.index("tpot_p50_s")


def test_what_failed_and_what_was_skipped_is_said() -> None:
    text = table([result({"longest_gap_s": 0.1}, "", CUT_SHORT, "queue full", "queue full", note="half")], WORKLOADS)
    assert "note: half" in text
    assert text.count("failed: ") == text.count("failed: queue full") == 1


def test_the_sizes_that_were_used_are_said() -> None:
    one = result({"longest_gap_s": 0.1})
    one.parameters.update(seed=7, rate_per_s=2.0, n_prompt=50)
    text = table([one], WORKLOADS)
    assert "with rate_per_s 2, n_prompt 50" in text
    assert "seed" not in text


def test_an_interrupted_run_shows_what_it_has() -> None:
    assert "ttft_p50_s" in table([result({"ttft_p50_s": 0.5})], WORKLOADS)


def test_nothing_measured_is_no_text() -> None:
    assert table([], WORKLOADS) == ""


def price(**given: float) -> float | None:
    values: dict[str, float | None] = {"price_per_hour": None, "watts": None, "price_per_kwh": None}
    return price_per_hour(**(values | given))


def test_a_million_tokens_at_a_thousand_a_second_take_a_thousand_seconds():
    assert cost_per_million_tokens(3.6, 1000.0) == pytest.approx(1.0)


def test_nothing_generated_costs_without_end():
    assert math.isinf(cost_per_million_tokens(1.0, 0.0))


def test_a_price_per_hour_is_taken_as_it_is():
    assert price(price_per_hour=2.5) == 2.5
    assert price(price_per_hour=0.0) == 0.0


def test_watts_are_thousandths_of_kilowatts():
    assert price(watts=500.0, price_per_kwh=0.4) == pytest.approx(0.2)


def test_without_any_price_there_is_none():
    assert price() is None


@pytest.mark.parametrize("given", [{"watts": 60.0}, {"price_per_kwh": 0.3}])
def test_half_of_an_energy_price_is_refused(given: dict[str, float]):
    with pytest.raises(BadRequest, match="go together"):
        price(**given)


@pytest.mark.parametrize("other", [{"watts": 60.0}, {"price_per_kwh": 0.3}])
def test_two_kinds_of_prices_are_refused(other: dict[str, float]):
    with pytest.raises(BadRequest, match="not both"):
        price(price_per_hour=1.0, **other)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_price_that_is_none_is_refused(value: float):
    with pytest.raises(BadRequest):
        price(price_per_hour=value)


def chart_point(streams: int, rate: float, bound: float | None = None) -> CurvePoint:
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
    chart = decode_chart(
        {
            "us": [chart_point(1, 100, 1000), chart_point(8, 300, 4000)],
            "them": [chart_point(1, 90), chart_point(8, 250)],
        }
    )
    for text in ("us", "them", "bound", "streams"):
        assert any(text in line for line in chart)
    assert chart[-2].split() == ["1", "8"]
    assert not any("\x1b" in line for line in chart)
    assert all(len(line) <= 78 for line in chart)


def test_the_better_curve_lies_higher():
    lines = decode_chart(
        {"us": [chart_point(1, 1000), chart_point(2, 1000)], "them": [chart_point(1, 10), chart_point(2, 10)]}
    )
    height = {mark: [at for at, line in enumerate(lines) if mark * 8 in line] for mark in "ox"}
    assert max(height["o"]) < min(height["x"])


def test_without_points_there_is_no_chart():
    assert decode_chart({}) == []
    assert decode_chart({"us": []}) == []


def text(lines: list[str]) -> str:
    return "\n".join(lines)


def golden(expected: str) -> str:
    return inspect.cleandoc(expected)


def point(streams: int, rate: float, bound: float | None) -> CurvePoint:
    return CurvePoint(
        streams=streams, tokens_per_s=rate, request_tokens_per_s=rate / streams, prefill_tokens_per_s=900.0,
        bound_tokens_per_s=None if bound is None else bound * streams,
    )  # fmt: skip


def curve(bound: float | None) -> dict[str, list[CurvePoint]]:
    return {"us": [point(1, 250.0, bound), point(16, 500.0, bound)]}


def test_a_curve_says_together_each_and_the_share_of_the_bound():
    assert text(curve_tables(curve(1000.0), None)).strip() == golden(
        """
        decode curve, tokens per second, us
          streams  together     each  prefill    bound  of bound
          1         250.0/s  250.0/s    900/s   1000/s       25%
          16        500.0/s   31.2/s    900/s  16000/s        3%
          plateau 500.0/s, no knee up to 16 streams
        """
    )


def test_a_curve_that_flattens_has_its_knee_named():
    points = [point(streams, rate, None) for streams, rate in ((1, 100.0), (2, 190.0), (4, 200.0))]
    assert "  plateau 200.0/s, knee at 2" in curve_tables({"us": points}, None)


def test_a_price_adds_what_a_million_tokens_cost():
    lines = curve_tables(curve(None), 1.8)
    assert lines[1].endswith("per million tokens")
    assert [line.split()[-3:] for line in lines[2:4]] == [["-", "-", "2"], ["-", "-", "1"]]


def test_notes_and_problems_are_said_once_and_streams_that_were_cut_are_none():
    target = Target("us", "http://127.0.0.1:1", "m")
    result = RunResult(workload="shared", target=target, parameters={}, metrics={}, records=[], note="skipped")
    problems = ["status 500: no", "status 500: no", "cut short by the load generator", "broken", "late", "later"]
    result.records.extend(StreamRecord(intended_at_s=0, sent_at_s=0, problem=problem) for problem in problems)
    start = "shared, us: "
    expected = [start + reason for reason in ("skipped", "status 500: no", "broken", "late")]
    assert note_lines([result, result]) == expected


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned(("a", "b"), [("long name", "1"), ("x", "10000")]) == [
        "a              b",
        "long name      1",
        "x          10000",
    ]
