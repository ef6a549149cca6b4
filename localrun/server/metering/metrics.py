"""The numbers for Prometheus (`GET /metrics`): histograms, counters, and gauges that are read at scrape time.

Owner: one per Runtime, on the daemon's event loop; its registry is its own, so that two runtimes in one process (tests)
do not share counters. Names follow the Prometheus customs: base units, unit as suffix, `_total` on counters.

Invariants: label values are bounded: `model` is a model's own name, never what a client made up; `api` is a route's
family; `outcome` is done, cancelled or failed; `tier` is ram or disk. Nothing here is per request or per client.

Does not: keep windows or percentiles for people (telemetry.py does), or listen on a port of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from localrun import wire
from localrun.server.jobs.registry import RequestRecord
from localrun.snapshot import EngineRow, RequestState

# From one fast GPU step to a slow machine's long prompt; about three per decade, so quantiles over machines make sense.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 300.0)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
QUEUE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
LOAD_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PREFILL_BUCKETS_TOKENS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)


class Live(NamedTuple):
    """The state of the moment, asked for at each scrape. The dictionaries map a model's name to requests."""

    engines: list[EngineRow]
    running: dict[str, int]
    queued: dict[str, int]
    loading: int


class LiveSource(Protocol):
    """Where `Live` comes from; set once by the runtime."""

    def live(self) -> Live: ...


class _ModelMetrics:
    """The labelled children of one model, looked up once and not per token."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.ttft = metrics.ttft.labels(model)
        self.itl = metrics.itl.labels(model)
        self.queue = metrics.queue.labels(model)
        self.prefill = metrics.prefill.labels(model)
        self.step = metrics.step.labels(model)
        self.load = metrics.load.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.deaths = metrics.deaths.labels(model)


class Metrics:
    """See the module."""

    def __init__(self, source: LiveSource) -> None:
        # A `_created` series beside every counter and histogram doubles the page and says nothing new.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        model = ("model",)
        self.ttft = Histogram(
            "localrun_time_to_first_token_seconds",
            "From a request's arrival, loading and queueing included, to its first token.",
            model, buckets=TTFT_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.itl = Histogram(
            "localrun_inter_token_seconds", "Time between the tokens of a stream, one sample per token.",
            model, buckets=ITL_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.queue = Histogram(
            "localrun_queue_seconds", "From the engine's acceptance of a request to its first computed row.",
            model, buckets=QUEUE_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.request = Histogram(
            "localrun_request_seconds", "From a request's arrival to its end.",
            ("model", "api"), buckets=REQUEST_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.prefill = Histogram(
            "localrun_request_prefill_tokens", "Prompt tokens of a request that the cache did not have.",
            model, buckets=PREFILL_BUCKETS_TOKENS, registry=registry,
        )  # fmt: skip
        self.step = Histogram(
            "localrun_step_seconds", "Duration of engine steps that computed something.",
            model, buckets=ITL_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.load = Histogram(
            "localrun_model_load_seconds", "Duration of model loads that succeeded.",
            model, buckets=LOAD_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.requests = Counter(
            "localrun_requests", "Requests that ended.", ("model", "api", "outcome"), registry=registry
        )
        self.prompt_tokens = Counter(
            "localrun_prompt_tokens", "Prompt tokens of ended requests, cached ones included.", model, registry=registry
        )
        self.cached_tokens = Counter(
            "localrun_cached_tokens", "Prompt tokens of ended requests that the cache had.", model, registry=registry
        )
        self.restored_tokens = Counter(
            "localrun_restored_tokens", "Prompt tokens whose saved state was copied back instead of computed, by tier.",
            ("model", "tier"), registry=registry,
        )  # fmt: skip
        self.output_tokens = Counter("localrun_output_tokens", "Tokens generated.", model, registry=registry)
        self.deaths = Counter(
            "localrun_engine_deaths",
            "Engine processes that ended without being asked to; the next request starts a new one.",
            model, registry=registry,
        )  # fmt: skip
        self._models: dict[str, _ModelMetrics] = {}
        registry.register(_LiveCollector(source))
        ProcessCollector(registry=registry)

    def of(self, model: str) -> _ModelMetrics:
        """The children of one model. `model` is a name from the store."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _ModelMetrics(self, model)
        return found

    def saw_tokens(self, record: RequestRecord, n_tokens: int, seconds_each: float | None) -> None:
        metrics = self.of(record.model)
        metrics.output_tokens.inc(n_tokens)
        if seconds_each is not None:
            for _ in range(n_tokens):
                metrics.itl.observe(seconds_each)
        elif record.ttft_s is not None:
            metrics.ttft.observe(record.ttft_s)

    def saw_end(self, record: RequestRecord) -> None:
        """A request that never reached a model is counted without the name that it asked for."""
        model = record.model if record.was_loaded else ""
        self.requests.labels(model, record.api, record.state.value).inc()
        if not record.was_loaded or record.ended_at_s is None:
            return
        self.request.labels(model, record.api).observe(record.ended_at_s - record.arrived_at_s)
        metrics = self.of(model)
        metrics.prompt_tokens.inc(record.n_prompt or 0)
        metrics.cached_tokens.inc(record.n_cached or 0)
        if record.n_prompt is not None and record.first_token_at_s is not None:
            metrics.prefill.observe(record.n_prompt - (record.n_cached or 0))
        if record.usage is not None and record.first_token_at_s is not None:
            metrics.queue.observe(record.usage.queued_s)

    def saw_restored(self, model: str, tier: str, n_tokens: int) -> None:
        """`tier` is ram or disk."""
        self.restored_tokens.labels(model, tier).inc(n_tokens)

    def saw_step(self, model: str, stats: wire.StepStats) -> None:
        if stats.n_prefill_rows or stats.n_decode_rows:
            self.of(model).step.observe(stats.step_s)

    def page(self, accept: str) -> tuple[bytes, str]:
        """The whole page and its content type, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _LiveCollector(Collector):
    """Gauges, made from `Live` at each scrape, so that a step never touches them."""

    def __init__(self, source: LiveSource) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        live = self._source.live()
        names = [row.model for row in live.engines]
        ready = [row for row in live.engines if row.state == "ready"]
        yield GaugeMetricFamily("localrun_models_loaded", "Models that are loaded.", value=len(ready))
        yield GaugeMetricFamily(
            "localrun_requests_loading", "Requests waiting for a model to load.", value=live.loading
        )
        yield _by_model(
            "localrun_requests_running", "Requests in a slot.", {name: live.running.get(name, 0) for name in names}
        )
        yield _by_model(
            "localrun_requests_queued",
            "Requests waiting for a slot.",
            {name: live.queued.get(name, 0) for name in names},
        )
        yield _by_model("localrun_kv_cells", "KV cells of the pool.", {row.model: row.kv_cells for row in ready})
        yield _by_model("localrun_kv_cells_used", "KV cells in use.", {row.model: row.kv_cells_used for row in ready})
        yield _by_model(
            "localrun_ram_cache_bytes",
            "Memory taken by the saved state of idle prefixes.",
            {row.model: row.ram_cache_bytes for row in ready},
        )
        yield _by_model(
            "localrun_disk_cache_bytes",
            "Disk space taken by the saved state of idle prefixes.",
            {row.model: row.disk_cache_bytes for row in ready},
        )
        yield _by_model(
            "localrun_ram_cache_entries",
            "Saved segments of prefixes in memory.",
            {row.model: row.ram_entries for row in ready},
        )
        yield _by_model(
            "localrun_disk_cache_entries",
            "Saved segments of prefixes on disk.",
            {row.model: row.disk_entries for row in ready},
        )


def _by_model(name: str, documentation: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=["model"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


RUNNING_STATES = (RequestState.PREFILL, RequestState.DECODE)
