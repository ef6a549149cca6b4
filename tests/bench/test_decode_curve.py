from __future__ import annotations

import pytest

from localrun.bench.decode_curve import decode_curves, gain_per_doubling, knee
from localrun.bench.results import RunResult, Target


def result(name: str, workload: str = "decode", **metrics: float) -> RunResult:
    target = Target(name, "http://127.0.0.1:1", "m")
    sizes: dict[str, object] = {"n_prompt": 50, "n_output": 100}
    return RunResult(workload=workload, target=target, parameters=sizes, metrics=dict(metrics), records=[])  # type: ignore[arg-type]


def test_points_are_medians_over_the_rounds_by_rising_streams():
    rounds = [
        result(
            "us", c10_decode_tokens_per_s=rate, c2_decode_tokens_per_s=rate / 2, c2_request_p50_tokens_per_s=rate / 4
        )
        for rate in (100.0, 900.0, 300.0)
    ]
    points = decode_curves(rounds, None)["us"]
    assert [(point.streams, point.tokens_per_s, point.request_tokens_per_s) for point in points] == [
        (2, 150.0, 75.0),
        (10, 300.0, 0.0),
    ]


def test_the_bound_is_asked_for_half_of_the_output():
    asked: list[tuple[int, float]] = []

    def bound_of(n_streams: int, context_tokens: float) -> float:
        asked.append((n_streams, context_tokens))
        return 400.0

    [point] = decode_curves([result("us", c4_decode_tokens_per_s=100.0)], bound_of)["us"]
    assert asked == [(4, 100.0)]
    assert point.share_of_bound == 0.25


def test_without_a_bandwidth_there_is_no_bound():
    [point] = decode_curves([result("us", c4_decode_tokens_per_s=100.0)], None)["us"]
    assert (point.bound_tokens_per_s, point.share_of_bound) == (None, None)


def test_servers_are_kept_apart_and_other_workloads_left_out():
    results = [
        result("us", c1_decode_tokens_per_s=1.0),
        result("them", c1_decode_tokens_per_s=2.0),
        result("us", workload="shared", c1_decode_tokens_per_s=9.0),
        result("idle", workload="shared", wall_s=1.0),
    ]
    curves = decode_curves(results, None)
    assert {name: [point.tokens_per_s for point in points] for name, points in curves.items()} == {
        "us": [1.0],
        "them": [2.0],
    }


def test_the_knee_is_the_last_number_of_streams_that_paid() -> None:
    assert knee({1: 100.0, 2: 180.0, 4: 300.0, 8: 310.0, 16: 305.0}) == 4


def test_a_curve_that_rises_to_its_end_has_no_knee_yet() -> None:
    assert knee({1: 100.0, 2: 150.0, 4: 200.0}) is None
    assert knee({1: 100.0}) is None


def test_a_falling_curve_has_its_knee_at_the_start() -> None:
    assert knee({1: 100.0, 2: 90.0, 4: 80.0}) == 1


def test_the_gain_counts_per_doubling_however_far_the_step() -> None:
    assert gain_per_doubling(1, 100.0, 2, 150.0) == pytest.approx(0.5)
    assert gain_per_doubling(1, 100.0, 8, 800.0) == pytest.approx(1.0)
    assert knee({1: 100.0, 8: 130.0}) == 1
    assert knee({1: 100.0, 8: 140.0}) is None


def test_the_order_of_measuring_does_not_matter() -> None:
    assert knee({4: 300.0, 1: 100.0, 8: 310.0, 2: 180.0}) == 4
