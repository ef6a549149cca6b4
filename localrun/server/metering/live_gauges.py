"""What `/metrics` says of this moment, made at each scrape, so that a step never touches it: requests, engines and
batches, and what the cluster's nodes have done. Which daemon tells of which engine is said in `telemetry.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from localrun.server.jobs.registry import Registry
from localrun.snapshot import ENGINE_GAUGES, NODE_TOTALS, Aggregate, BatchRow, EngineRow, RequestState

RUNNING_STATES = (RequestState.PREFILL, RequestState.DECODE)


class Nodes(Protocol):
    """The cluster. `node` is this machine in it. `is_counted_here` says whether this daemon counts what replicas do,
    and `totals` has that by model and node: the fields of `NODE_TOTALS`, which never fall."""

    node: str
    is_counted_here: bool

    def totals(self) -> Mapping[tuple[str, str], Mapping[str, int]]: ...


@dataclass(eq=False)
class LiveCollector(Collector):
    requests: Registry
    engine_rows: Callable[[], list[EngineRow]]
    batch_rows: Callable[[], list[BatchRow]]
    nodes: Nodes | None

    def collect(self) -> Iterable[Metric]:
        engines = self.engine_rows()
        names = [row.model for row in engines]
        counts_replicas = self.nodes is not None and self.nodes.is_counted_here
        ready = [row for row in engines if row.state == "ready" and (counts_replicas or not row.replica)]
        running = self.requests.counts_by_engine(*RUNNING_STATES)
        queued = self.requests.counts_by_engine(RequestState.QUEUED)
        yield GaugeMetricFamily("localrun_models_loaded", "Models that are loaded.", value=len(ready))
        yield GaugeMetricFamily(
            "localrun_requests_loading",
            "Requests waiting for a model to load.",
            value=self.requests.count(RequestState.LOADING),
        )
        yield _by_model("localrun_requests_running", "Requests in a slot.", {name: running[name] for name in names})
        yield _by_model(
            "localrun_requests_queued", "Requests waiting for a slot.", {name: queued[name] for name in names}
        )
        for name, (field, text) in ENGINE_GAUGES.items():
            yield _by_engine(f"localrun_{name}", text, ready, field)
        if self.nodes is not None:
            totals = self.nodes.totals() if counts_replicas else {}
            for name, (field, text) in NODE_TOTALS.items():
                family = CounterMetricFamily(f"localrun_{name}", text, labels=["model", "node"])
                for place, of_place in totals.items():
                    family.add_metric(place, of_place[field])
                yield family
        batches = self.batch_rows()
        yield GaugeMetricFamily("localrun_batches", "Batches that have not ended.", value=len(batches))
        yield GaugeMetricFamily(
            "localrun_batches_waiting",
            "Batches whose lines wait: for memory, room on the disk, an engine or their key's limit.",
            value=sum(bool(row.waits_for) for row in batches),
        )
        yield GaugeMetricFamily(
            "localrun_batch_lines_left",
            "Lines of batches without a result.",
            value=sum(row.lines - row.succeeded - row.errored for row in batches),
        )


def _by_model(name: str, documentation: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=["model"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


def _by_engine(name: str, documentation: str, rows: Sequence[EngineRow], field: str) -> Metric:
    """Engines of one model on one node together; `node` is a label where there are nodes."""
    sums: Counter[tuple[str, str]] = Counter()
    for row in rows:
        sums[row.model, row.node] += getattr(row, field)
    family = GaugeMetricFamily(name, documentation, labels=["model"])
    for (model, node), value in sums.items():
        family.add_sample(name, {"model": model, **({"node": node} if node else {})}, value)
    return family


class Totals(msgspec.Struct, kw_only=True):
    """What only these names need. Times are of requests that have ended; `n_busy` sums the busy slots of all steps, and
    `n_tokens_max` is the longest prompt with its answer."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    n_steps: int = 0
    n_busy: int = 0
    n_tokens_max: int = 0
    n_drafts: int = 0


@dataclass(eq=False)
class LlamaServerNames(Collector):
    """What llama-server calls it. `aggregate` gives the totals of all models as of now."""

    totals: Totals
    aggregate: Callable[[], Aggregate]

    def collect(self) -> Iterable[Metric]:
        own, all_models = self.totals, self.aggregate()
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
