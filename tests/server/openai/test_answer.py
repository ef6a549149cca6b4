"""Counts and rates."""

from __future__ import annotations

import msgspec
import pytest

from localrun.server.openai.answer import timings_of, usage_of
from localrun.wire import Usage


def test_a_prompt_counts_once() -> None:
    def used(n_cached: int) -> Usage:
        return Usage(n_prompt=10, n_cached=n_cached, n_output=3, queued_s=0, prefill_s=0.5, decode_s=0.25)

    choices = [used(4), used(9), used(2), used(9)]
    assert msgspec.to_builtins(usage_of(choices[::2], choices, n_thinking=5)) == {
        "prompt_tokens": 20,
        "completion_tokens": 12,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }


def test_timings() -> None:
    timings = timings_of(Usage(n_prompt=10, n_cached=4, n_output=3, queued_s=0, prefill_s=0.5, decode_s=0.25))
    assert (timings.cache_n, timings.prompt_n, timings.predicted_n) == (4, 6, 3)
    assert (timings.prompt_ms, timings.predicted_ms) == (500.0, 250.0)
    assert timings.prompt_per_second == pytest.approx(12)
    assert timings.predicted_per_second == pytest.approx(8)
    one = timings_of(Usage(n_prompt=1, n_cached=1, n_output=1, queued_s=0, prefill_s=0, decode_s=0))
    assert one.predicted_per_second is None
