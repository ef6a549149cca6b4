from __future__ import annotations

import inspect

from localrun.bench.compare import Run, Threshold, Verdict, compare
from localrun.bench.decode_curve import CurvePoint
from localrun.bench.record import StreamRecord
from localrun.bench.report import aligned, comparison_tables, curve_tables, note_lines, verdict_lines
from localrun.bench.results import Options, RunResult, Target, Workload


async def never(target: Target, options: Options) -> RunResult:
    raise AssertionError("a report runs nothing")


SHARED = Workload("shared", "8 requests at once", never, ("cold_wall_s", "warm_*"))


def run(name: str, round_index: int, workload: str = "shared", note: str = "", **metrics: float) -> Run:
    target = Target(name, "http://127.0.0.1:1", "m")
    result = RunResult(workload=workload, target=target, parameters={}, metrics=dict(metrics), records=[], note=note)
    return Run(round_index=round_index, result=result)


def text(lines: list[str]) -> str:
    return "\n".join(lines)


def golden(expected: str) -> str:
    return inspect.cleandoc(expected)


def test_a_comparison_is_a_table_per_workload_with_the_opponent_marked():
    runs = []
    for at, (ours, split, unified) in enumerate([(4.0, 16.0, 30.0), (5.0, 20.0, 25.0), (6.0, 17.5, 31.25)]):
        runs.append(run("us", at, cold_wall_s=ours, warm_ttft_p50_s=0.05, hidden_s=1.0, completion_ratio=1.0))
        runs.append(run("them", at, cold_wall_s=split, warm_ttft_p50_s=0.1, hidden_s=1.0, completion_ratio=1.0))
        runs.append(run("them -kvu", at, cold_wall_s=unified, completion_ratio=1.0))
    runs += [run("us", 0, "memory", rss_bytes=300e6), run("them", 0, "memory", rss_bytes=400e6)]
    tables = comparison_tables(compare(runs, "us"), {"shared": SHARED}, ("us", "them", "them -kvu"))
    assert text(tables).strip() == golden(
        """
        shared: 8 requests at once
          metric                us        them  them -kvu  ratio  lowest to highest
          cold_wall_s       5.00 s   17.50 s *    30.00 s   0.25       0.25 to 0.34
          warm_ttft_p50_s  50.0 ms  100.0 ms *          -   0.50       0.50 to 0.50

          cold_wall_s
            us         ██████▋ 5.00 s
            them       ███████████████████████▍ 17.50 s
            them -kvu  ████████████████████████████████████████ 30.00 s

        memory
          metric         us      them  them -kvu  ratio  lowest to highest
          rss_bytes  300 MB  400 MB *          -   0.75       0.75 to 0.75
        """
    )


def test_requests_that_did_not_complete_are_a_row():
    runs = [run("us", 0, cold_wall_s=1.0, completion_ratio=1.0), run("them", 0, cold_wall_s=1.0, completion_ratio=0.75)]
    tables = text(comparison_tables(compare(runs, "us"), {"shared": SHARED}, ("us", "them")))
    assert "completion_ratio       1   0.750 *   1.33" in tables


def test_what_cannot_be_compared_is_a_dash():
    tables = comparison_tables(compare([run("us", 0, cold_wall_s=1.0)], "us"), {"shared": SHARED}, ("us", "them"))
    assert tables[2].split() == ["cold_wall_s", "1.00", "s", "-", "-", "-"]


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


def test_verdicts_say_what_was_asked_and_what_was_found():
    threshold = Threshold("shared", "cold_wall_s", True, 0.3)
    assert verdict_lines([Verdict(threshold, 0.25), Verdict(threshold, 0.35), Verdict(threshold, None)]) == [
        "met     shared:cold_wall_s<=0.3: 0.250",
        "MISSED  shared:cold_wall_s<=0.3: 0.350",
        "MISSED  shared:cold_wall_s<=0.3: not measured",
    ]


def test_notes_and_problems_are_said_once_and_streams_that_were_cut_are_none():
    result = run("us", 0, note="skipped").result
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
