from __future__ import annotations

from localrun.bench.latency import LatencyRange, latency_ranges
from localrun.bench.results import RunResult, Target


def result(workload: str, **metrics: float) -> RunResult:
    target = Target("us", "http://127.0.0.1:1", "m")
    return RunResult(workload=workload, target=target, parameters={}, metrics=dict(metrics), records=[])


def four(start: str, value: float) -> dict[str, float]:
    return {
        f"{start}_{end}_s": value * factor
        for end, factor in zip(("p50", "p95", "p99", "max"), (1, 2, 3, 4), strict=True)
    }


def test_each_percentile_is_the_median_over_the_rounds():
    [found] = latency_ranges([result("shared", **four("cold_ttft", value)) for value in (1.0, 10.0, 2.0)])
    assert found == LatencyRange(
        target="us", label="shared cold", kind="ttft", p50_s=2.0, p95_s=4.0, p99_s=6.0, max_s=8.0
    )


def test_first_tokens_and_gaps_are_apart_and_a_workload_without_parts_has_its_name():
    found = latency_ranges([result("chat", **four("ttft", 1.0), **four("itl", 0.1), **four("tpot", 0.1), wall_s=3.0)])
    assert [(each.label, each.kind) for each in found] == [("chat", "ttft"), ("chat", "itl")]
