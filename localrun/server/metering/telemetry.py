"""Gathers what requests and engines do, and shows it: snapshots for people, and a page for Prometheus (`GET /metrics`).

Owner: one per Runtime, on the daemon's event loop. Everything that is called per step or per token is a few additions;
what costs more (rows, percentiles, asking the system) happens when somebody looks, and is shared by all who look at
about the same time.

Invariants: a number in a snapshot is what the jobs themselves saw: output tokens, TTFT and inter-token times are taken
from the deltas that were handed to them; prompt and cached tokens count when a request ends, as its `usage` says. The
page follows the Prometheus customs (base units, unit as suffix, `_total` on counters), and its label values are
bounded: `model` is the name that a model was loaded under, also for requests by its other names, and never what a
client made up; `api` is a route, and `family` a `failures.Shape` or "connection"; `outcome` is done, cancelled or
failed; `reason` is why a request ended, a finish reason or an error's `code`, or of tiers a rule in routing.py;
`kind` is no_numbers or unknown_token; `tier` is ram or disk; `source` is a `wire.DraftSource`; `key` is the name of an
API key; `name` is a tier's in the settings file, `size` small or large. Nothing on it is per request, per client or per
batch. What can be told beforehand is there with 0, since a rate does not see a series begin with 1; what is of a model
that is gone goes.

In a cluster whoever sums over all daemons counts nothing twice. What is of requests is counted by the daemon that they
came to. What is of engines has the label `node`: each daemon tells of the engines that it started itself, and of the
replicas that the cluster did only the head's does, which always runs one. It tells of them as they say themselves, so
that requests of all daemons are in it; histograms and deaths of engines are those of daemons' own.

Does not: decide anything; nothing in the daemon acts on these numbers.
"""

from __future__ import annotations

import platform
import time
from collections import Counter as Sums
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase

import localrun
from localrun import errors, wire
from localrun.config import Settings
from localrun.errors import NoNumbers, UnknownToken
from localrun.server.engines.link import EngineLink
from localrun.server.engines.machine import MachineSampler, llama_cpp_version
from localrun.server.http.exchange import CLIENT_GONE, Account
from localrun.server.http.failures import Shape
from localrun.server.jobs.generation import CALLED, Generation, LatencyWindow, RateWindow
from localrun.server.jobs.registry import Registry
from localrun.server.metering.live_gauges import RUNNING_STATES, LiveCollector, LlamaServerNames, Nodes, Totals
from localrun.snapshot import ENGINE_COUNTERS, Aggregate, BatchRow, EngineRow, RequestState, Snapshot

# Codes of errors: what llama.cpp handed back could not be used.
UNUSABLE = (NoNumbers.code, UnknownToken.code)

OUTCOMES = tuple(state.value for state in RequestState if state.is_final)
# Why requests usually end; other reasons have a series once one has ended so.
ANSWERED = (wire.Finish.STOP.value, CALLED, wire.Finish.LENGTH.value, wire.Finish.CANCELLED.value)
NO_FAMILY = "connection"
NO_REASON = "none"  # it generated nothing: it was there to load the model, to count, or for vectors
REFUSED = tuple(
    kind.code
    for kind in (
        *(errors.BadRequest, errors.ContextExceeded, errors.QueueFull, errors.CannotFit, errors.Unavailable),
        *(errors.EngineDied, errors.EngineFailed, errors.ModelNotFound),
    )
)
# Routes that compute.
COMPUTING = (
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"),
    *("/v1/fim/completions", "/completion", "/infill"),
)

# From one fast GPU step to a slow machine's long prompt; about three per decade, so quantiles over machines make sense.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 300.0)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
QUEUE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
LOAD_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SPEEDUP_BUCKETS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
LENGTH_BUCKETS_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
PREFILL_BUCKETS_TOKENS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)

_FIELDS = [field for _, _, fields in ENGINE_COUNTERS.values() for field in fields.values()]
_totals_of = attrgetter(*_FIELDS)
# A step without news compares only what holds the fields.
_sources_of = attrgetter(*dict.fromkeys(field.partition(".")[0] for field in _FIELDS))


class _ModelMetrics:
    """The labelled children of one model, looked up once and not per token."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.ttft = metrics.ttft.labels(model)
        self.itl = metrics.itl.labels(model)
        self.queue = metrics.queue.labels(model)
        self.prefill = metrics.prefill.labels(model)
        self.prompt_length = metrics.prompt_length.labels(model)
        self.output_length = metrics.output_length.labels(model)
        self.step = metrics.step.labels(model)
        self.load = metrics.load.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.deaths = metrics.deaths.labels(model)
        self.resumed = metrics.resumed.labels(model)
        self.speedup = metrics.speedup.labels(model)
        self.of_engine = [family.labels(model, *values) for family, fields in metrics.of_engines for values in fields]
        for reason in (*ANSWERED, NO_REASON, *REFUSED):
            metrics.ends.labels(model, reason)


class Metrics:
    """The families of the Prometheus page. Its registry is its own, so that two runtimes in one process (tests) do not
    share counters."""

    def __init__(self) -> None:
        # A `_created` series beside every counter and histogram doubles the page and says nothing new.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.families: list[MetricWrapperBase] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            self.families.append(made := Counter(f"localrun_{name}", text, labels, registry=registry))
            return made

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            self.families.append(
                made := Histogram(f"localrun_{name}", text, labels, buckets=buckets, registry=registry)
            )
            return made

        self.ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival, loading and queueing included, to its first "
            "token.", TTFT_BUCKETS_S, "model",
        )  # fmt: skip
        self.itl = histogram(
            "inter_token_seconds", "Time between the tokens of a stream, one sample per token.", ITL_BUCKETS_S, "model"
        )
        self.queue = histogram(
            "queue_seconds", "From the engine's acceptance of a request until it has a slot.",
            QUEUE_BUCKETS_S, "model",
        )  # fmt: skip
        self.request = histogram(
            "request_seconds", "From a request's arrival to its end.", REQUEST_BUCKETS_S, "model", "api"
        )
        self.prefill = histogram(
            "request_prefill_tokens", "Prompt tokens of a request that the cache did not have.",
            PREFILL_BUCKETS_TOKENS, "model",
        )  # fmt: skip
        self.prompt_length = histogram(
            "request_prompt_tokens", "Tokens of a request's prompt, cached ones included.",
            LENGTH_BUCKETS_TOKENS, "model",
        )  # fmt: skip
        self.output_length = histogram(
            "request_output_tokens", "Tokens of a request's answer.", LENGTH_BUCKETS_TOKENS, "model"
        )
        self.step = histogram(
            "step_seconds", "Time that engine steps computed, from rows to tokens, without what else the engine's main "
            "thread did (`long_steps` in `localrun ps --json`).", ITL_BUCKETS_S, "model",
        )  # fmt: skip
        self.load = histogram("model_load_seconds", "Duration of model loads that succeeded.", LOAD_BUCKETS_S, "model")
        self.requests = counter("requests", "Requests that ended.", "model", "api", "outcome")
        self.ends = counter(
            "request_ends", "Requests that ended, by their finish reason or the code of their error.", "model", "reason"
        )
        self.responses = counter(
            "http_responses", f"Answers to HTTP requests, by API and status; {CLIENT_GONE} is a client that left "
            f"before, the family {NO_FAMILY} what was refused before it was a request.", "family", "status",
        )  # fmt: skip
        self.errors = counter(
            "errors", "Errors that clients were told of, also as the last event of a stream.", "code", "status"
        )
        self.key_requests = counter("key_requests", "Requests of an API key that ended.", "key")
        self.key_prompt_tokens = counter(
            "key_prompt_tokens", "Prompt tokens of an API key's ended requests, cached ones included.", "key"
        )
        self.key_output_tokens = counter(
            "key_output_tokens", "Tokens generated for an API key's ended requests.", "key"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests, cached ones included.", "model")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens of ended requests that the cache had.", "model")
        self.output_tokens = counter("output_tokens", "Tokens generated.", "model")
        self.deaths = counter(
            "engine_deaths", "Engine processes that ended without being asked to; the next request starts a new one.",
            "model",
        )  # fmt: skip
        self.unusable = counter(
            "unusable_results", "Requests that ended because llama.cpp handed back what cannot be used: no_numbers or "
            "an unknown_token.", "model", "kind",
        )  # fmt: skip
        self.resumed = counter(
            "requests_resumed", "Times that a request went on on another engine because its own had died.", "model"
        )
        self.drafts = counter("drafts", "Drafts that were verified, by what made them.", "model", "source")
        self.draft_tokens = counter("draft_tokens", "Tokens of drafts that were verified.", "model", "source")
        self.accepted_tokens = counter(
            "draft_tokens_accepted", "Tokens of drafts that became part of an answer.", "model", "source"
        )
        self.draft_seconds = counter("draft_seconds", "Time that making drafts took.", "model", "source")
        self.speedup = histogram(
            "request_speedup_ratio", "How many times as fast answers with drafts were as without, by what their steps "
            "took.", SPEEDUP_BUCKETS, "model",
        )  # fmt: skip
        self.of_engines = [
            (counter(name, text, "model", *labels), fields) for name, (text, labels, fields) in ENGINE_COUNTERS.items()
        ]
        self.routed = counter(
            "tier_requests", "Requests to a tier, by the model that it chose and the rule that decided.",
            "name", "size", "reason",
        )  # fmt: skip
        self.probe_tokens = counter(
            "tier_probe_tokens", "Tokens that small models of tiers generated to see how sure they are.", "name"
        )
        self.probe_seconds = counter(
            "tier_probe_seconds", "Time that small models of tiers took to show how sure they are.", "name"
        )
        self.batch_lines = counter("batch_lines", "Lines of batches that have a result, by what it is.", "outcome")
        self.batches = counter("batches_ended", "Batches that ended, by how they did.", "status")
        build = Info("localrun_build", "What runs.", registry=registry)
        build.info(
            {"version": localrun.__version__, "llama_cpp": llama_cpp_version(), "python": platform.python_version()}
        )
        self._models: dict[str, _ModelMetrics] = {}
        self._expected: set[tuple[str, str]] = set()
        for api in COMPUTING:
            self.expect("", api)
        for reason in REFUSED:
            self.ends.labels("", reason)
        kinds = errors.kinds()
        for kind in kinds:
            self.errors.labels(kind.code, str(kind.status))
        for family in Shape:
            for status in (200, CLIENT_GONE, *(kind.status for kind in kinds)):
                self.responses.labels(family.value, str(status))
        ProcessCollector(registry=registry)

    def of(self, model: str) -> _ModelMetrics:
        """The children of one model. `model` is a name from the store."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _ModelMetrics(self, model)
        return found

    def expect(self, model: str, api: str) -> None:
        """Requests of this kind are about to end."""
        if (model, api) not in self._expected:
            self._expected.add((model, api))
            for outcome in OUTCOMES:
                self.requests.labels(model, api, outcome)

    def models(self, but: Collection[str]) -> list[str]:
        """The models that have series, without some of them."""
        return [name for name in self._models if name not in but]

    def forget(self, model: str) -> None:
        """Its series go."""
        for family in self.families:
            if "model" in family._labelnames:
                family.remove_by_labels({"model": model})
        self._models.pop(model, None)
        self._expected = {each for each in self._expected if each[0] != model}

    def page(self, accept: str) -> tuple[bytes, str]:
        """The whole page and its content type, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _EngineMeter:
    """The rates of one engine, and what it had counted at its last step."""

    def __init__(self, metrics: _ModelMetrics) -> None:
        self.metrics = metrics
        self.decode = RateWindow()
        self.prefill = RateWindow()
        self.step = 0
        self.output_total = 0
        self.prefill_total = 0
        self.sources: tuple[object, ...] = ()
        self.totals: tuple[float, ...] = (0,) * len(_FIELDS)
        self.drafts: tuple[wire.DraftCounts, ...] = ()


class Telemetry:
    """See the module. `engine_rows` gives the rows of engines, `batch_rows` those of batches, and `loaded_as` the name
    under which a model is loaded that a request names otherwise; empty for none. `nodes` is the cluster, in one."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        engine_rows: Callable[[], list[EngineRow]],
        batch_rows: Callable[[], list[BatchRow]] = list,
        loaded_as: Callable[[str], str] = lambda name: "",
        nodes: Nodes | None = None,
    ) -> None:
        self._own_node = "" if nodes is None else nodes.node
        self._settings = settings
        self._registry = registry
        self._engine_rows = engine_rows
        self._batch_rows = batch_rows
        self._loaded_as = loaded_as
        self._machine = MachineSampler()
        self._started_s = time.monotonic()
        self.started_at_s = time.time()
        self._meters: dict[EngineLink, _EngineMeter] = {}
        self._ttft = LatencyWindow()
        self._itl = LatencyWindow()
        self._totals = Aggregate()
        self._encoder = msgspec.json.Encoder()
        self._encoded = b""
        self._encoded_at_s = float("-inf")
        self.metrics = Metrics()
        self.metrics.registry.register(LiveCollector(registry, engine_rows, batch_rows, nodes))
        self._llama_totals = Totals()
        self.metrics.registry.register(LlamaServerNames(self._llama_totals, lambda: self._aggregate(time.monotonic())))

    # --- told by jobs and engines --------------------------------------------------------------------------------

    def tokens(self, record: Generation, n_tokens: int, seconds_each: float | None, now_s: float) -> None:
        """New tokens of a request; `seconds_each` is None for its first."""
        metrics = self.metrics.of(record.engine)
        self._totals.output_tokens_total += n_tokens
        metrics.output_tokens.inc(n_tokens)
        if seconds_each is not None:
            self._itl.add(now_s, seconds_each, n_tokens)
            for _ in range(n_tokens):
                metrics.itl.observe(seconds_each)
        elif record.ttft_s is not None:
            self._ttft.add(now_s, record.ttft_s)
            metrics.ttft.observe(record.ttft_s)

    def loaded(self, record: Generation) -> None:
        """It has its model."""
        self.metrics.of(record.engine)
        self.metrics.expect(record.engine, record.api)

    def resumed(self, record: Generation) -> None:
        """Its engine died, and another one goes on."""
        self.metrics.of(record.engine).resumed.inc()

    def batch_lines(self, outcome: str, n_lines: int) -> None:
        self.metrics.batch_lines.labels(outcome).inc(n_lines)

    def batch_ended(self, status: str) -> None:
        self.metrics.batches.labels(status).inc()

    def refused(self, status: int) -> None:
        """A connection was, before there was a request."""
        self.metrics.responses.labels(NO_FAMILY, str(status)).inc()

    def answered(self, family: Shape, account: Account) -> None:
        """An HTTP request has ended."""
        self.metrics.responses.labels(family.value, str(account.status or CLIENT_GONE)).inc()
        if account.error is not None:
            self.metrics.errors.labels(account.error.code, str(account.error.status)).inc()

    def left(self, record: Generation) -> None:
        """Its answer is complete: only now is it known whether that was a call."""
        model = record.engine or self._loaded_as(record.model)
        self.metrics.ends.labels(model, record.error_code or record.finish_reason or NO_REASON).inc()

    def ended(self, record: Generation) -> None:
        """A request's record became final. One that never reached a model has no part in the page's figures by model
        beyond its end, and is counted there without the name that it asked for if no model is loaded by it."""
        totals = self._totals
        totals.requests_total += 1
        totals.failed_total += record.state is RequestState.FAILED
        totals.cancelled_total += record.state is RequestState.CANCELLED
        totals.prompt_tokens_total += record.n_prompt or 0
        totals.cached_tokens_total += record.n_cached or 0
        self._registry.ended(record)
        model = record.engine or self._loaded_as(record.model)
        self.metrics.requests.labels(model, record.api, record.state.value).inc()
        if record.key:
            self.metrics.key_requests.labels(record.key).inc()
            self.metrics.key_prompt_tokens.labels(record.key).inc(record.n_prompt or 0)
            self.metrics.key_output_tokens.labels(record.key).inc(record.n_output)
        if not record.was_loaded or record.ended_at_s is None:
            return
        self.metrics.request.labels(model, record.api).observe(record.ended_at_s - record.arrived_at_s)
        metrics = self.metrics.of(model)
        if record.error_code in UNUSABLE:
            self.metrics.unusable.labels(model, record.error_code).inc()
        if record.node:  # of this machine's engines they are counted with each step
            self._count_drafts(model, record.drafts, {})
        metrics.prompt_tokens.inc(record.n_prompt or 0)
        metrics.cached_tokens.inc(record.n_cached or 0)
        if record.usage is not None:
            metrics.prompt_length.observe(record.usage.n_prompt)
            metrics.output_length.observe(record.usage.n_output)
            llama = self._llama_totals
            llama.prefill_s += record.usage.prefill_s
            llama.decode_s += record.usage.decode_s
            llama.n_tokens_max = max(llama.n_tokens_max, record.usage.n_prompt + record.usage.n_output)
        if record.first_token_at_s is not None:
            if record.n_prompt is not None:
                metrics.prefill.observe(record.n_prompt - (record.n_cached or 0))
            if record.usage is not None:
                metrics.queue.observe(record.usage.queued_s)
        if record.speedup is not None:
            metrics.speedup.observe(record.speedup)

    def engine_loaded(self, link: EngineLink) -> None:
        self._meters[link] = meter = _EngineMeter(self.metrics.of(link.model))
        meter.metrics.load.observe(link.ready.load_s)

    def engine_step(self, link: EngineLink, step: wire.Step) -> None:
        stats = step.stats
        meter = self._meters.get(link)
        if meter is None:
            return
        n_output = sum(len(delta.tokens) for delta in step.deltas)
        if n_output:
            meter.output_total += n_output
            meter.decode.add(step.sent_at_s, stats.step_s, n_output)
        n_prefill = stats.prefill_tokens_total - meter.prefill_total
        if n_prefill:
            meter.prefill.add(step.sent_at_s, stats.background_s or stats.step_s, n_prefill)
            meter.prefill_total = stats.prefill_tokens_total
        sources = _sources_of(stats)
        if sources != meter.sources:
            totals = _totals_of(stats)
            for child, total, before in zip(meter.metrics.of_engine, totals, meter.totals, strict=True):
                child.inc(total - before)
            meter.sources, meter.totals = sources, totals
        if stats.drafts != meter.drafts:
            self._count_drafts(link.model, stats.drafts, {one.source: one for one in meter.drafts})
            meter.drafts = stats.drafts
        if stats.step != meter.step:  # else the background computed, beside or between steps
            meter.step = stats.step
            meter.metrics.step.observe(stats.step_s)
            self._llama_totals.n_steps += 1
            self._llama_totals.n_busy += stats.n_running

    def _count_drafts(
        self, model: str, now: tuple[wire.DraftCounts, ...], before: dict[wire.DraftSource, wire.DraftCounts]
    ) -> None:
        """What came since the last step of an engine. Both are totals, by source."""
        metrics, totals = self.metrics, self._totals
        for counts in now:
            last = before.get(counts.source) or wire.DraftCounts(counts.source, 0, 0, 0)
            n_drafted, n_accepted = counts.n_drafted - last.n_drafted, counts.n_accepted - last.n_accepted
            self._llama_totals.n_drafts += counts.n_drafts - last.n_drafts
            totals.drafted_tokens_total += n_drafted
            totals.accepted_tokens_total += n_accepted
            labels = (model, counts.source.value)
            metrics.drafts.labels(*labels).inc(counts.n_drafts - last.n_drafts)
            metrics.draft_tokens.labels(*labels).inc(n_drafted)
            metrics.accepted_tokens.labels(*labels).inc(n_accepted)
            metrics.draft_seconds.labels(*labels).inc(counts.seconds - last.seconds)

    def engine_ended(self, link: EngineLink) -> None:
        self._meters.pop(link, None)
        if link.died:
            self.metrics.of(link.model).deaths.inc()

    # --- shown ---------------------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        """Everything as of now; the system's figures are up to a second old."""
        pids = [row.pid for row in self._engine_rows() if row.pid is not None and row.node == self._own_node]
        sample = await self._machine.sample(pids)
        rows, now_s = self._engine_rows(), time.monotonic()
        meters = {link.pid: meter for link, meter in self._meters.items()}
        for row in rows:
            if row.node == self._own_node:
                row.rss_bytes = sample.rss_by_pid.get(row.pid or 0)
            if not row.replica and (meter := meters.get(row.pid)) is not None:
                row.tokens_per_s, row.prefill_tokens_per_s = meter.decode.per_s(now_s), meter.prefill.per_s(now_s)
                row.output_tokens_total = meter.output_total
        return Snapshot(
            time_s=time.time(),
            uptime_s=now_s - self._started_s,
            version=localrun.__version__,
            aggregate=self._aggregate(now_s, [row for row in rows if row.replica]),
            engines=rows,
            requests=self._registry.rows(),
            system=sample.system,
            batches=self._batch_rows(),
        )

    async def encoded_snapshot(self, max_age_s: float) -> bytes:
        """A snapshot as JSON, shared with others who asked within `max_age_s`."""
        if time.monotonic() - self._encoded_at_s > max_age_s:
            self._encoded = self._encoder.encode(await self.snapshot())
            self._encoded_at_s = time.monotonic()
        return self._encoded

    def _aggregate(self, now_s: float, replicas: Sequence[EngineRow] = ()) -> Aggregate:
        """Of what replicas say that they do for others as well."""
        count, totals, meters = self._registry.count, self._totals, self._meters.values()
        n_prompt, n_cached = self._registry.prompt_tokens()
        for_own = self._registry.tokens_per_s_on_nodes(now_s)
        of_replicas = max(for_own, sum(row.tokens_per_s for row in replicas))
        prefill_of_replicas = sum(row.prefill_tokens_per_s for row in replicas)
        return msgspec.structs.replace(
            totals,
            decode_tokens_per_s=sum(meter.decode.per_s(now_s) for meter in meters) + of_replicas,
            prefill_tokens_per_s=sum(meter.prefill.per_s(now_s) for meter in meters) + prefill_of_replicas,
            running=count(*RUNNING_STATES) + self._n_of_others(replicas, "slots_busy", *RUNNING_STATES),
            queued=count(RequestState.QUEUED) + self._n_of_others(replicas, "queued", RequestState.QUEUED),
            loading=count(RequestState.LOADING),
            prefix_hit_rate=_share(totals.cached_tokens_total + n_cached, totals.prompt_tokens_total + n_prompt),
            draft_hit_rate=_share(totals.accepted_tokens_total, totals.drafted_tokens_total),
            ttft_s=self._ttft.percentiles(now_s),
            itl_s=self._itl.percentiles(now_s),
        )

    def _n_of_others(self, replicas: Sequence[EngineRow], field: str, *states: RequestState) -> int:
        own, there = self._registry.counts_by_node(*states), Sums[tuple[str, str]]()
        for row in replicas:
            there[row.model, row.node] += getattr(row, field)
        return (there - own).total()  # what is more there than here


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
