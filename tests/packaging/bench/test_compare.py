from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.compare import Run, Spread, Threshold, Verdict, compare, judge, parse_threshold
from localrun.bench.results import RunResult, Target
from localrun.errors import BadRequest


def run(name: str, round_index: int, workload: str = "load", **metrics: float) -> Run:
    target = Target(name, "http://127.0.0.1:1", "m")
    result = RunResult(workload=workload, target=target, parameters={}, metrics=dict(metrics), records=[])
    return Run(round_index=round_index, result=result)


def test_a_ratio_is_of_the_same_round_and_its_median_is_of_the_ratios():
    # The machine was slow for both in the second round: the ratio does not see it.
    ours, theirs = (1.0, 10.0, 2.0), (2.0, 20.0, 3.0)
    runs = [run("us", at, wall_s=value) for at, value in enumerate(ours)]
    runs += [run("them", at, wall_s=value) for at, value in enumerate(theirs)]
    [comparison] = compare(runs, "us")
    assert comparison.ratio == Spread(median=0.5, lowest=0.5, highest=2 / 3, n_rounds=3)
    assert comparison.subject == Spread(median=2.0, lowest=1.0, highest=10.0, n_rounds=3)
    assert comparison.opponents == {"them": Spread(median=3.0, lowest=2.0, highest=20.0, n_rounds=3)}


@pytest.mark.parametrize(("metric", "best"), [("wall_s", "split"), ("decode_tokens_per_s", "unified")])
def test_the_better_opponent_counts_and_what_is_better_depends_on_the_metric(metric: str, best: str):
    runs = [run("us", 0, **{metric: 3.0}), run("split", 0, **{metric: 2.0}), run("unified", 0, **{metric: 6.0})]
    [comparison] = compare(runs, "us")
    assert comparison.opponent == best
    assert comparison.ratio is not None
    assert comparison.ratio.median == (1.5 if best == "split" else 0.5)


def test_the_better_opponent_may_be_another_one_for_another_metric():
    runs = [
        run("us", 0, wall_s=1.0, ttft_s=1.0),
        run("split", 0, wall_s=1.0, ttft_s=2.0),
        run("unified", 0, wall_s=2.0, ttft_s=1.0),
    ]
    assert {each.metric: each.opponent for each in compare(runs, "us")} == {"wall_s": "split", "ttft_s": "unified"}


def test_rounds_that_one_side_lacks_are_left_out_of_the_ratio():
    runs = [run("us", at, wall_s=1.0) for at in range(3)] + [run("them", 1, wall_s=4.0)]
    [comparison] = compare(runs, "us")
    assert comparison.ratio == Spread(median=0.25, lowest=0.25, highest=0.25, n_rounds=1)


def test_nothing_can_be_compared_with_zero_or_with_nobody():
    [with_zero] = compare([run("us", 0, failed_count=0.0), run("them", 0, failed_count=0.0)], "us")
    [alone] = compare([run("us", 0, wall_s=1.0)], "us")
    assert with_zero.ratio is None
    assert (alone.opponent, alone.ratio) == (None, None)


def test_the_same_metric_of_two_workloads_is_two_comparisons_in_the_order_of_running():
    runs = [run(name, 0, workload, wall_s=1.0) for workload in ("b", "a") for name in ("us", "them")]
    assert [(each.workload, each.metric) for each in compare(runs, "us")] == [("b", "wall_s"), ("a", "wall_s")]


def test_what_only_the_opponent_measured_is_left_out():
    assert compare([run("us", 0, wall_s=1.0), run("them", 0, wall_s=1.0, extra_s=2.0)], "us")[0].metric == "wall_s"
    assert len(compare([run("us", 0, wall_s=1.0), run("them", 0, extra_s=2.0)], "us")) == 1


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=9))
def test_swapping_the_sides_turns_the_spread_around(pairs: list[tuple[float, float]]):
    def ratio(subject: str) -> Spread:
        runs = [run(name, at, wall_s=pair[index]) for at, pair in enumerate(pairs) for index, name in enumerate("ab")]
        spread = compare(runs, subject)[0].ratio
        assert spread is not None
        return spread

    one, other = ratio("a"), ratio("b")
    assert one.lowest == pytest.approx(1 / other.highest)
    assert one.highest == pytest.approx(1 / other.lowest)
    assert one.lowest <= one.median <= one.highest


@pytest.mark.parametrize(
    ("text", "threshold"),
    [
        ("shared:cold_wall_s<=0.3", Threshold("shared", "cold_wall_s", True, 0.3)),
        ("decode:c8_decode_tokens_per_s >= 1", Threshold("decode", "c8_decode_tokens_per_s", False, 1.0)),
        ("memory:rss_bytes<=1.1", Threshold("memory", "rss_bytes", True, 1.1)),
    ],
)
def test_a_threshold_is_written_as_one_would_say_it(text: str, threshold: Threshold):
    assert parse_threshold(text) == threshold
    assert parse_threshold(str(threshold)) == threshold


@pytest.mark.parametrize(
    "text", ["", "shared", "shared:wall_s", "shared:wall_s<0.3", "shared:wall_s<=", "a:b<=x", "a:b<=1s"]
)
def test_a_threshold_that_cannot_be_read_is_refused(text: str):
    with pytest.raises(BadRequest, match="WORKLOAD:METRIC<=RATIO"):
        parse_threshold(text)


@pytest.mark.parametrize(
    ("relation", "ratio", "is_met"), [("<=", 0.3, True), ("<=", 0.31, False), (">=", 0.3, True), (">=", 0.29, False)]
)
def test_a_verdict_includes_its_limit(relation: str, ratio: float, is_met: bool):
    runs = [run("us", 0, wall_s=ratio), run("them", 0, wall_s=1.0)]
    [verdict] = judge(compare(runs, "us"), [parse_threshold(f"load:wall_s{relation}0.3")])
    assert verdict.ratio == pytest.approx(ratio)
    assert verdict.is_met is is_met


def test_what_was_not_measured_is_missed():
    threshold = parse_threshold("load:wall_s<=1")
    assert judge(compare([run("us", 0, wall_s=1.0)], "us"), [threshold]) == [Verdict(threshold, None)]
    assert not Verdict(threshold, None).is_met
