"""OpenAI's `usage`, and the `timings` that llama-server puts beside it.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localrun.wire import Usage


def usage(prompts: Sequence[Usage], choices: Sequence[Usage], *, n_thinking: int = 0) -> dict[str, Any]:
    """`prompts` has one entry per prompt, `choices` one per answer: a prompt with several answers counts once.
    `n_thinking` of the answers' tokens were thinking."""
    n_prompt = sum(one.n_prompt for one in prompts)
    n_output = sum(one.n_output for one in choices)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_output,
        "total_tokens": n_prompt + n_output,
        "prompt_tokens_details": {"cached_tokens": sum(one.n_cached for one in prompts)},
        "completion_tokens_details": {"reasoning_tokens": n_thinking},
    }


def timings(one: Usage) -> dict[str, Any]:
    """Milliseconds and rates of one answer. `prompt_n` counts what was computed, `cache_n` what was not."""
    n_computed = one.n_prompt - one.n_cached
    return {
        "cache_n": one.n_cached,
        "prompt_n": n_computed,
        "prompt_ms": one.prefill_s * 1000,
        "prompt_per_second": _rate(n_computed, one.prefill_s),
        "predicted_n": one.n_output,
        "predicted_ms": one.decode_s * 1000,
        # The time runs from the first token to the last, so it is that of all but one.
        "predicted_per_second": _rate(one.n_output - 1, one.decode_s),
    }


def _rate(n_tokens: int, seconds: float) -> float | None:
    return n_tokens / seconds if seconds > 0 and n_tokens > 0 else None
