from __future__ import annotations

import inspect

from bench.compare import Run, Threshold, Verdict, compare
from bench.tables import comparison_tables, verdict_lines
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


def test_verdicts_say_what_was_asked_and_what_was_found():
    threshold = Threshold("shared", "cold_wall_s", True, 0.3)
    assert verdict_lines([Verdict(threshold, 0.25), Verdict(threshold, 0.35), Verdict(threshold, None)]) == [
        "met     shared:cold_wall_s<=0.3: 0.250",
        "MISSED  shared:cold_wall_s<=0.3: 0.350",
        "MISSED  shared:cold_wall_s<=0.3: not measured",
    ]
