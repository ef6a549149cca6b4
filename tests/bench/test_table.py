"""Results as text."""

from __future__ import annotations

import pytest

from localrun.bench.results import Metrics, RunResult, Target
from localrun.bench.streams import CUT_SHORT
from localrun.bench.table import shown, table
from localrun.bench.workloads import WORKLOADS
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
