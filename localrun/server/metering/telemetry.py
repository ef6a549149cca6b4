"""Gathers what requests and engines do, and shows it: snapshots for people, and it feeds the Prometheus metrics.

Owner: one per Runtime, on the daemon's event loop. Everything that is called per step or per token is a few additions;
what costs more (rows, percentiles, asking the system) happens when somebody looks, and is shared by all who look at
about the same time.

Invariants: a number in a snapshot is what the jobs themselves saw: output tokens, TTFT and inter-token times are taken
from the deltas that were handed to them; prompt and cached tokens count when a request ends, as its `usage` says.

Does not: decide anything; nothing in the daemon acts on these numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

import localrun
from localrun import wire
from localrun.config import Settings
from localrun.server.engines.link import EngineLink
from localrun.server.engines.machine import MachineSampler
from localrun.server.jobs.registry import Registry, RequestRecord
from localrun.server.metering.metrics import RUNNING_STATES, Live, Metrics
from localrun.server.metering.windows import LatencyWindow, RateWindow
from localrun.snapshot import Aggregate, EngineRow, RequestState, Snapshot


class _EngineMeter:
    """The rates of one engine."""

    def __init__(self) -> None:
        self.decode = RateWindow()
        self.prefill = RateWindow()
        self.prefill_total = 0
        self.ram_restored_total = 0
        self.disk_restored_total = 0


class Telemetry:
    """See the module. `engine_rows` gives the supervisor's rows."""

    def __init__(self, settings: Settings, registry: Registry, engine_rows: Callable[[], list[EngineRow]]) -> None:
        self._settings = settings
        self._registry = registry
        self._engine_rows = engine_rows
        self._machine = MachineSampler()
        self._started_s = time.monotonic()
        self._meters: dict[EngineLink, _EngineMeter] = {}
        self._ttft = LatencyWindow()
        self._itl = LatencyWindow()
        self._totals = Aggregate()
        self._encoder = msgspec.json.Encoder()
        self._encoded = b""
        self._encoded_at_s = float("-inf")
        self.metrics = Metrics(self)

    # --- told by jobs and engines --------------------------------------------------------------------------------

    def tokens(self, record: RequestRecord, n_tokens: int, seconds_each: float | None, now_s: float) -> None:
        """New tokens of a request; `seconds_each` is None for its first."""
        self._totals.output_tokens_total += n_tokens
        if seconds_each is not None:
            self._itl.add(now_s, seconds_each, n_tokens)
        elif record.ttft_s is not None:
            self._ttft.add(now_s, record.ttft_s)
        self.metrics.saw_tokens(record, n_tokens, seconds_each)

    def ended(self, record: RequestRecord) -> None:
        """A request's record became final."""
        totals = self._totals
        totals.requests_total += 1
        totals.failed_total += record.state is RequestState.FAILED
        totals.cancelled_total += record.state is RequestState.CANCELLED
        totals.prompt_tokens_total += record.n_prompt or 0
        totals.cached_tokens_total += record.n_cached or 0
        self._registry.ended(record)
        self.metrics.saw_end(record)

    def engine_loaded(self, link: EngineLink) -> None:
        self._meters[link] = _EngineMeter()
        self.metrics.of(link.model).load.observe(link.ready.load_s)

    def engine_step(self, link: EngineLink, step: wire.Step) -> None:
        stats = step.stats
        meter = self._meters.get(link)
        if meter is None:
            return
        n_output = sum(len(delta.tokens) for delta in step.deltas)
        if n_output:
            meter.decode.add(step.sent_at_s, stats.step_s, n_output)
        if stats.prefill_tokens_total < meter.prefill_total:  # the link started another process
            meter.prefill_total = 0
        n_prefill = stats.prefill_tokens_total - meter.prefill_total
        if n_prefill:
            meter.prefill.add(step.sent_at_s, stats.step_s, n_prefill)
            meter.prefill_total = stats.prefill_tokens_total
        if stats.ram_restored_tokens_total > meter.ram_restored_total:
            self.metrics.saw_restored(link.model, "ram", stats.ram_restored_tokens_total - meter.ram_restored_total)
            meter.ram_restored_total = stats.ram_restored_tokens_total
        if stats.disk_restored_tokens_total > meter.disk_restored_total:
            self.metrics.saw_restored(link.model, "disk", stats.disk_restored_tokens_total - meter.disk_restored_total)
            meter.disk_restored_total = stats.disk_restored_tokens_total
        self.metrics.saw_step(link.model, stats)

    def engine_ended(self, link: EngineLink) -> None:
        self._meters.pop(link, None)
        if link.died:
            self.metrics.of(link.model).deaths.inc()

    # --- shown ---------------------------------------------------------------------------------------------------

    def live(self) -> Live:
        return Live(
            engines=self._engine_rows(),
            running=self._registry.counts_by_model(*RUNNING_STATES),
            queued=self._registry.counts_by_model(RequestState.QUEUED),
            loading=self._registry.count(RequestState.LOADING),
        )

    async def snapshot(self) -> Snapshot:
        """Everything as of now; the system's figures are up to a second old."""
        rows = self._engine_rows()
        sample = await self._machine.sample([row.pid for row in rows if row.pid is not None])
        rows = self._engine_rows()
        for row in rows:
            row.rss_bytes = sample.rss_by_pid.get(row.pid or 0)
        now_s = time.monotonic()
        return Snapshot(
            time_s=time.time(),
            uptime_s=now_s - self._started_s,
            version=localrun.__version__,
            aggregate=self._aggregate(now_s),
            engines=rows,
            requests=self._registry.rows(),
            system=sample.system,
        )

    async def encoded_snapshot(self, max_age_s: float) -> bytes:
        """A snapshot as JSON, shared with others who asked within `max_age_s`."""
        if time.monotonic() - self._encoded_at_s > max_age_s:
            self._encoded = self._encoder.encode(await self.snapshot())
            self._encoded_at_s = time.monotonic()
        return self._encoded

    def _aggregate(self, now_s: float) -> Aggregate:
        count, totals = self._registry.count, self._totals
        return Aggregate(
            decode_tokens_per_s=sum(meter.decode.per_s(now_s) for meter in self._meters.values()),
            prefill_tokens_per_s=sum(meter.prefill.per_s(now_s) for meter in self._meters.values()),
            running=count(*RUNNING_STATES),
            queued=count(RequestState.QUEUED),
            loading=count(RequestState.LOADING),
            requests_total=totals.requests_total,
            failed_total=totals.failed_total,
            cancelled_total=totals.cancelled_total,
            prompt_tokens_total=totals.prompt_tokens_total,
            cached_tokens_total=totals.cached_tokens_total,
            output_tokens_total=totals.output_tokens_total,
            prefix_hit_rate=totals.cached_tokens_total / totals.prompt_tokens_total
            if totals.prompt_tokens_total
            else None,
            ttft_s=self._ttft.percentiles(now_s),
            itl_s=self._itl.percentiles(now_s),
        )
