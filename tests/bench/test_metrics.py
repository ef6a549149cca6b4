"""Percentiles against numpy's, and their order; the decode curve and its knee."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.bench.metrics import (
    contended_until_s,
    decode_curves,
    difference_bound_tokens,
    gain_per_doubling,
    gaps_s,
    gaps_touching_s,
    goodput,
    is_good,
    jain_index,
    knee,
    longest_s,
    lowest_share,
    outcomes,
    percentile,
    service_by_client,
    service_tokens,
    stream_metrics,
    summary,
)
from localrun.bench.results import RunResult, Target
from tests.bench.made_records import made_record

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_numpy_s_and_lies_within_the_values(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)
    assert min(values) <= found <= max(values)


@given(VALUES)
def test_higher_percentiles_are_not_lower(values: list[float]) -> None:
    reported = summary("ttft", values)
    assert list(reported) == ["ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "ttft_max_s"]
    assert list(reported.values()) == sorted(reported.values())
    assert reported["ttft_max_s"] == max(values)


def test_the_median_of_two_lies_between_them() -> None:
    assert percentile([3.0, 1.0], 50) == 2.0


def test_nothing_measured_is_nothing_reported() -> None:
    assert summary("itl", []) == {}


ARRIVALS = st.lists(st.floats(0, 1000), max_size=30).map(sorted)


@given(ARRIVALS)
def test_gaps_add_up_to_the_whole_time(arrivals: list[float]) -> None:
    gaps = gaps_s(arrivals)
    assert len(gaps) == max(0, len(arrivals) - 1)
    assert all(gap >= 0 for gap in gaps)
    assert sum(gaps) == pytest.approx(arrivals[-1] - arrivals[0] if arrivals else 0.0)


@given(ARRIVALS, st.floats(0, 1000), st.floats(0, 1000))
def test_a_window_has_the_gaps_of_the_whole_that_touch_it(arrivals: list[float], one: float, other: float) -> None:
    start_s, end_s = min(one, other), max(one, other)
    within = gaps_touching_s(arrivals, start_s, end_s)
    assert longest_s(within) <= longest_s(gaps_s(arrivals))
    # Together they cover whatever part of the window lies between the first and the last arrival.
    covered = min(end_s, arrivals[-1]) - max(start_s, arrivals[0]) if arrivals else 0.0
    assert sum(within) >= covered - 1e-6


def test_a_gap_that_begins_before_the_window_and_ends_after_it_counts_whole() -> None:
    assert gaps_touching_s([0.0, 1.0, 9.0, 10.0], 4.0, 5.0) == [8.0]


def test_gaps_outside_the_window_do_not_count() -> None:
    assert gaps_touching_s([0.0, 5.0, 5.5, 6.0, 20.0], 5.1, 5.9) == [0.5, 0.5]


def test_no_gap_is_no_time() -> None:
    assert longest_s([]) == 0.0


def test_the_decode_rate_is_that_of_all_streams_together() -> None:
    """From the last first token, at 2 s, to the first last one, at 4 s: what came before and after is of one stream."""
    records = [
        made_record(1.0, 2.0, 2.5, 3.0, 4.0, n_prompt=50),
        made_record(2.0, 3.0, 4.0, 5.0, n_prompt=50, n_cached=20),
    ]
    metrics = stream_metrics("c2", records)
    assert metrics["c2_decode_tokens_per_s"] == (3 + 2) / 2
    assert metrics["c2_prefill_tokens_per_s"] == 80 / 2
    assert metrics["c2_wall_s"] == 5.0
    assert (metrics["c2_prompt_tokens"], metrics["c2_cached_tokens"]) == (100, 20)


def test_the_decode_rate_of_more_streams_than_slots_is_that_of_full_slots() -> None:
    """Two at once, then one while the third one's prompt is computed, then two again."""
    records = [
        made_record(1.0, 2.0, 3.0),
        made_record(1.0, 3.0, 5.0, 7.0, 9.0, 11.0),
        made_record(9.0, 10.0, 11.0),
    ]
    assert stream_metrics("c3", records)["c3_decode_tokens_per_s"] == ((2 + 1) + (2 + 1)) / (2 + 2)


def test_a_piece_may_be_several_tokens() -> None:
    records = [made_record(1.0, 2.0, 3.0)]
    records[0].n_output = 6
    assert stream_metrics("", records)["decode_tokens_per_s"] == 4 / 2


def test_streams_one_after_another_decode_one_at_once() -> None:
    records = [made_record(1.0, 2.0), made_record(4.0, 6.0)]
    assert stream_metrics("", records)["decode_tokens_per_s"] == 2 / 3


def test_ttft_itl_and_tpot_are_three_different_things() -> None:
    # A stream in steady steps, and one that is silent for long and then sends the rest at once.
    steady, stuttering = made_record(1.0, 1.1, 1.2, 1.3, 1.4), made_record(2.0, 2.1, 2.2, 2.3, 6.0)
    metrics = stream_metrics("", [steady, stuttering])
    assert metrics["ttft_p50_s"] == pytest.approx(1.5)
    assert metrics["itl_p50_s"] == pytest.approx(0.1)
    assert metrics["longest_gap_s"] == metrics["itl_max_s"] == pytest.approx(3.7)
    assert metrics["tpot_max_s"] == pytest.approx(1.0)
    assert metrics["request_p50_tokens_per_s"] == pytest.approx((10 + 1) / 2)


def test_what_failed_is_counted_but_not_measured() -> None:
    records = [
        made_record(1.0, 2.0),
        made_record(50.0, 90.0, problem="the connection broke"),
        made_record(problem="queue full", status=429, retry_after_s=2.0),
        made_record(99.0, problem="cut"),
    ]
    assert stream_metrics("", records)["ttft_max_s"] == 1.0
    assert outcomes("open", records, ignoring="cut") == {
        "open_completion_ratio": pytest.approx(1 / 3),
        "open_refused_count": 1,
        "open_failed_count": 1,
    }


def test_nothing_complete_is_no_metric() -> None:
    assert stream_metrics("cold", [made_record(problem="broke")]) == {}


def test_one_token_has_no_pace() -> None:
    metrics = stream_metrics("", [made_record(1.0)])
    assert metrics["ttft_p50_s"] == 1.0
    assert not {name for name in metrics if name.startswith(("itl", "tpot", "decode", "request"))}


LIMITS = {"ttft_limit_s": 1.0, "itl_limit_s": 0.1}


def test_good_is_in_time_at_both_ends() -> None:
    assert is_good(made_record(1.0, 1.1, 1.2), **LIMITS)
    assert not is_good(made_record(1.1, 1.2, 1.3), **LIMITS)
    assert not is_good(made_record(0.5, 1.0, 1.5), **LIMITS)
    assert is_good(made_record(0.5), **LIMITS)


def test_a_request_that_failed_is_not_good_however_fast_it_was() -> None:
    assert not is_good(made_record(0.1, 0.2, problem="broke"), **LIMITS)
    assert not is_good(made_record(), **LIMITS)


def test_goodput_counts_the_good_ones_and_compares_with_all_that_were_sent() -> None:
    records = [made_record(0.5, 0.55), made_record(0.5, 0.55), made_record(3.0, 3.1), made_record(problem="refused")]
    assert goodput("", records, 10.0, **LIMITS) == {"goodput_requests_per_s": 0.2, "goodput_ratio": 0.5}
    assert goodput("open", [], 10.0, **LIMITS)["open_goodput_ratio"] == pytest.approx(0.0)


SERVICE = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1)


def test_service_is_the_computed_prompt_and_twice_the_output_so_far() -> None:
    record = made_record(1.0, 2.0, 3.0, 4.0, n_prompt=100, n_cached=60)
    assert service_tokens(record, 0.5) == 0.0
    assert service_tokens(record, 1.0) == 40 + 2 * 1
    assert service_tokens(record, 9.0) == 40 + 2 * 4


def test_a_piece_of_several_tokens_counts_as_these() -> None:
    assert service_tokens(made_record(1.0, 2.0, n_output=10), 1.5) == 2 * 5


def test_of_a_stream_that_was_cut_the_pieces_count() -> None:
    assert service_tokens(made_record(1.0, 2.0, 3.0, n_output=0, problem="cut"), 2.5) == 2 * 2


def test_contention_ends_when_somebody_s_last_request_has_begun() -> None:
    records = [made_record(1.0, 9.0, client="a"), made_record(5.0, 6.0, client="a"), made_record(8.0, client="b")]
    assert contended_until_s(records) == 5.0


def test_a_client_without_any_service_has_no_share() -> None:
    service = service_by_client([made_record(1.0, client="a"), made_record(client="b")], 2.0)
    assert service == {"a": 2.0, "b": 0.0}
    assert lowest_share(service) == 0.0


@given(SERVICE)
def test_shares_lie_between_nothing_and_equal(service: dict[str, float]) -> None:
    assert 0 <= lowest_share(service) <= 1 + 1e-9
    assert 1 / len(service) - 1e-9 <= jain_index(service) <= 1 + 1e-9


@given(st.floats(1, 1e6), st.integers(1, 6))
def test_equal_service_is_fair(tokens: float, n_clients: int) -> None:
    service = dict.fromkeys("abcdef"[:n_clients], tokens)
    assert lowest_share(service) == pytest.approx(1)
    assert jain_index(service) == pytest.approx(1)


def test_one_of_four_that_gets_everything_is_the_worst() -> None:
    service = {"a": 10.0, "b": 0.0, "c": 0.0, "d": 0.0}
    assert (lowest_share(service), jain_index(service)) == (0.0, 0.25)


def test_the_bound_is_twice_a_full_batch_or_a_longer_prompt() -> None:
    assert difference_bound_tokens(n_prompt=200, n_output=64, slots=8) == 2 * 2 * 8 * 264
    assert difference_bound_tokens(n_prompt=5000, n_output=1, slots=0) == 2 * 5000


# --- the decode curve ---


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
