"""llama-server's names on the page for Prometheus, for monitors and dashboards that look for these: sums over all
models of what the page says in its own names as well.

Does not: count per step or per request (telemetry.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from localrun.snapshot import Aggregate


class Totals(msgspec.Struct, kw_only=True):
    """What only these names need. Times are of requests that have ended; `n_busy` sums the busy slots of all steps, and
    `n_tokens_max` is the longest prompt with its answer."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    n_steps: int = 0
    n_busy: int = 0
    n_tokens_max: int = 0
    n_drafts: int = 0


class LlamaServerNames(Collector):
    """See the module. `aggregate` gives the totals of all models as of now."""

    def __init__(self, totals: Totals, aggregate: Callable[[], Aggregate]) -> None:
        self._totals = totals
        self._aggregate = aggregate

    def collect(self) -> Iterable[Metric]:
        own, all_models = self._totals, self._aggregate()
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens": (
                "Prompt tokens that were computed.",
                all_models.prompt_tokens_total - all_models.cached_tokens_total,
            ),
            "prompt_tokens_cached": ("Prompt tokens that the cache had.", all_models.cached_tokens_total),
            "prompt_seconds": ("Time that computing prompts took.", own.prefill_s),
            "tokens_predicted": ("Tokens generated.", all_models.output_tokens_total),
            "tokens_predicted_seconds": ("Time that generating took.", own.decode_s),
            "n_decode": ("Steps that computed something.", own.n_steps),
            "spec_decode_num_draft_tokens": ("Tokens that were drafted.", all_models.drafted_tokens_total),
            "spec_decode_num_accepted_tokens": (
                "Drafted tokens that became part of an answer.",
                all_models.accepted_tokens_total,
            ),
            "spec_decode_num_drafts": ("Drafts that were verified.", own.n_drafts),
        }
        gauges: dict[str, tuple[str, float]] = {
            "n_tokens_max": ("Tokens of the longest prompt with its answer.", own.n_tokens_max),
            "prompt_tokens_seconds": ("Prompt tokens a second now.", all_models.prefill_tokens_per_s),
            "predicted_tokens_seconds": ("Generated tokens a second now.", all_models.decode_tokens_per_s),
            "requests_processing": ("Requests in a slot.", all_models.running),
            "requests_deferred": ("Requests that wait.", all_models.queued + all_models.loading),
            "n_busy_slots_per_decode": ("Busy slots of an average step.", own.n_busy / max(own.n_steps, 1)),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"llamacpp:{name}", text, value=value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)
