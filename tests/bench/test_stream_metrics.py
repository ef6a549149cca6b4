"""From records to named metrics."""

from __future__ import annotations

import pytest

from localrun.bench.stream_metrics import outcomes, stream_metrics
from tests.bench.made_records import made_record


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
