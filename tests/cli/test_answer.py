"""What is written about an answer's speed."""

from __future__ import annotations

from localrun.cli.answer import decode_rate, metrics_table, prefill_rate, summary
from localrun.client import ChatMetrics

METRICS = ChatMetrics(
    prompt_tokens=30, cached_tokens=10, output_tokens=11, load_s=0.5, prefill_s=0.2, decode_s=0.5, total_s=1.25
)
ONE_TOKEN = ChatMetrics(
    prompt_tokens=30, cached_tokens=30, output_tokens=1, load_s=0, prefill_s=0, decode_s=0, total_s=0.1
)


def test_rates_count_only_what_was_computed_in_their_time():
    assert decode_rate(METRICS) == 20.0
    assert prefill_rate(METRICS) == 100.0


def test_there_is_no_rate_of_one_token_or_of_a_cached_prompt():
    assert decode_rate(ONE_TOKEN) is None
    assert prefill_rate(ONE_TOKEN) is None
    assert "eval rate:            - tokens/s" in metrics_table(ONE_TOKEN)


def test_the_table_has_every_line():
    assert metrics_table(METRICS).splitlines() == [
        "total duration:       1.25 s",
        "load duration:        500 ms",
        "prompt eval count:    30 token(s)",
        "prompt cached count:  10 token(s)",
        "prompt eval duration: 200 ms",
        "prompt eval rate:     100.00 tokens/s",
        "eval count:           11 token(s)",
        "eval duration:        500 ms",
        "eval rate:            20.00 tokens/s",
    ]


def test_the_summary_is_one_line():
    assert summary(METRICS, 0.7) == "20.00 tokens/s, 11 tokens, first after 700 ms, 10 of 30 prompt tokens cached"
