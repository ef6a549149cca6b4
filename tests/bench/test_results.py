"""What a record says of its request."""

from __future__ import annotations

import pytest

from tests.bench.made_records import made_record


def test_the_wait_counts_from_when_the_request_should_have_been_sent() -> None:
    record = made_record(5.0, 6.0, sent_s=4.0)
    record.intended_at_s = 1.0
    assert record.ttft_s == 4.0
    assert record.latency_s == 5.0


def test_time_per_output_token_counts_tokens_not_pieces() -> None:
    assert made_record(1.0, 2.0, 3.0, n_output=5).tpot_s == pytest.approx(0.5)
    assert made_record(1.0).tpot_s is None


@pytest.mark.parametrize(
    ("arrivals", "problem", "is_complete"), [((1.0,), "", True), ((), "", False), ((1.0,), "broke", False)]
)
def test_complete_is_text_and_no_problem(arrivals: tuple[float, ...], problem: str, is_complete: bool) -> None:
    assert made_record(*arrivals, problem=problem).is_complete is is_complete
