"""What is known of each request, and which requests there are: the active ones, and those that ended lately.

Runs in the daemon's event loop. A job is in the registry from the moment it is made, so that one which waits for a
model to load can be seen and cancelled; when it ends its record is frozen, and at most `MAX_ENDED` of those are kept
for `KEEP_ENDED_S`.
Does not: talk to the engine, hold the text, or build the whole snapshot (telemetry.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections import Counter, deque
from typing import TYPE_CHECKING

from localrun import wire
from localrun.errors import Conflict, NotFound
from localrun.server.metering.windows import LatencyHistogram, RateWindow
from localrun.snapshot import DraftRow, RequestRow, RequestState

if TYPE_CHECKING:
    from localrun.server.jobs.job import Job

_STATES = {
    wire.Phase.QUEUED: RequestState.QUEUED,
    wire.Phase.PREFILL: RequestState.PREFILL,
    wire.Phase.DECODE: RequestState.DECODE,
}


class RequestRecord:
    """What is known of one request: its state, its counts and its times.

    Pure: time is an argument. Owner: the job, which feeds it from arrival to end; the registry and the telemetry read
    it.

    Invariants: the state only becomes final once, and nothing changes after that; `n_output` counts tokens that the
    engine sampled, whether or not their text was already sent on. Token times are when the engine sent them: several
    quick steps may be read from the pipe at once, which must not look like a fast model. `n_drafted` and `n_accepted`
    count all engines that it ran on, though each counts from 0; `drafts` are the last one's, by their source.

    Does not: talk to the engine, or hold the text.

    `model` is the name asked for until the model is found, then its own name; `engine` is the name that its engine was
    loaded under, which is another one where names share files, empty before there is one. `key` is the name of the API
    key that it came with, empty for none. `number` counts the daemon's requests; `asked` is what it asked of the
    engine, without its prompt.
    """

    def __init__(
        self, request_id: str, api: str, client: str, lane: wire.Lane, model: str, arrived_at_s: float, *, key: str = ""
    ) -> None:
        self.id = request_id
        self.number = next(_NUMBERS)
        self.key = key
        self.api = api
        self.client = client
        self.lane = lane
        self.model = model
        self.arrived_at_s = arrived_at_s
        self.state = RequestState.LOADING
        self.engine = ""
        self.asked: wire.Submit | None = None
        self.engine_request_id: int | None = None
        self.adapters: tuple[str, ...] = ()
        self.tier = ""
        self.client_id = self.trace_id = ""
        self.slot: int | None = None
        self.last_slot: int | None = None
        self.started_at_s: float | None = None
        self.n_prompt: int | None = None
        self.n_cached: int | None = None
        self.n_computed = 0
        self.n_output = 0
        self.has_new_line = False
        self.usage: wire.Usage | None = None
        self.first_token_at_s: float | None = None
        self.last_token_at_s: float | None = None
        self.ended_at_s: float | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.error_code = ""
        self.resumed = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self.drafts: tuple[wire.DraftCounts, ...] = ()
        self.speedup: float | None = None
        self._drafted_before = (0, 0)
        self._n_first = 0
        self._rate = RateWindow()
        self._gaps = LatencyHistogram()

    @property
    def is_ended(self) -> bool:
        return self.ended_at_s is not None

    @property
    def ttft_s(self) -> float | None:
        """From arrival, loading and queueing included, to the first token."""
        return None if self.first_token_at_s is None else self.first_token_at_s - self.arrived_at_s

    @property
    def was_loaded(self) -> bool:
        return bool(self.engine)

    def loaded(self, model: str, engine: str) -> None:
        """The model is there; the request is not with the engine yet."""
        self.model = model
        self.engine = engine
        self.state = RequestState.QUEUED

    def resume(self) -> None:
        """Its engine died, and another one goes on."""
        self.resumed += 1
        self._drafted_before = (self.n_drafted, self.n_accepted)
        self.slot = None
        self.state = RequestState.QUEUED

    def started(self, started: wire.Started) -> None:
        self.slot = self.last_slot = started.slot
        if self.started_at_s is None:
            self.started_at_s = started.at_s
        self.n_prompt = started.n_prompt
        self.n_cached = started.n_cached
        self.n_computed = max(self.n_computed, started.n_cached)
        self.state = RequestState.PREFILL

    def progress(self, delta: wire.Delta, now_s: float) -> float | None:
        """Takes a delta in. Returns the seconds per token since the last ones; None without any, and for the first."""
        self.n_computed = delta.n_computed
        self.n_output = delta.n_output
        if delta.n_drafted:
            self._count_drafts(delta.n_drafted, delta.n_accepted)
        if not self.has_new_line and "\n" in delta.text:
            self.has_new_line = True
        if delta.finish is None:
            self.state = _STATES.get(delta.phase, self.state)
            if delta.phase is wire.Phase.QUEUED:  # it gave its slot up and waits again
                self.slot = None
        if not delta.tokens:
            return None
        n_tokens, last_s = len(delta.tokens), self.last_token_at_s
        self.last_token_at_s = now_s
        if last_s is None:
            self.first_token_at_s = now_s
            self._n_first = n_tokens
            return None
        gap_s = now_s - last_s
        self._rate.add(now_s, gap_s, n_tokens)
        self._gaps.add(gap_s / n_tokens, n_tokens)
        return gap_s / n_tokens

    def end(
        self,
        state: RequestState,
        now_s: float,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        error_code: str = "",
    ) -> None:
        """The one final change of state."""
        self.state = state
        self.ended_at_s = now_s
        self.slot = None
        self.finish_reason = finish_reason
        self.error = error
        self.error_code = error_code
        if self.usage is not None:
            self.n_prompt = self.usage.n_prompt
            self.n_cached = self.usage.n_cached
            self.n_output = self.usage.n_output
            self.drafts = drafts = self.usage.drafts
            self.speedup = self.usage.speedup if drafts else None
            self._count_drafts(sum(one.n_drafted for one in drafts), sum(one.n_accepted for one in drafts))

    def row(
        self, now_s: float, *, queue_position: int | None = None, predicted_wait_s: float | None = None
    ) -> RequestRow:
        """The row that people see. `queue_position` 1 is next."""
        is_decoding = self.state is RequestState.DECODE and self._gaps.count > 0
        return RequestRow(
            id=self.id,
            client=self.client,
            key=self.key,
            api=self.api,
            model=self.model,
            adapters=list(self.adapters),
            tier=self.tier,
            client_id=self.client_id,
            trace_id=self.trace_id,
            lane=self.lane.value,
            state=self.state,
            slot=self.slot,
            queue_position=queue_position,
            predicted_wait_s=predicted_wait_s,
            prompt_tokens=self.n_prompt,
            computed_tokens=min(self.n_computed, self.n_prompt or 0),
            cached_tokens=self.n_cached,
            output_tokens=self.n_output,
            tokens_per_s=self._rate.per_s(now_s) if is_decoding else None,
            tokens_per_s_avg=self._average_per_s(),
            ttft_s=self.ttft_s,
            itl_p50_s=self._gaps.quantiles(0.5)[0],
            age_s=(now_s if self.ended_at_s is None else self.ended_at_s) - self.arrived_at_s,
            finish_reason=self.finish_reason,
            error=self.error,
            resumed=self.resumed,
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted,
            drafts=[_draft_row(counts) for counts in self.drafts],
            speedup=self.speedup,
        )

    def _count_drafts(self, n_drafted: int, n_accepted: int) -> None:
        """By the engine that it runs on. One that says nothing of them, as in some ends, takes nothing back."""
        n_drafted_before, n_accepted_before = self._drafted_before
        self.n_drafted = max(self.n_drafted, n_drafted_before + n_drafted)
        self.n_accepted = max(self.n_accepted, n_accepted_before + n_accepted)

    def _average_per_s(self) -> float | None:
        """Output tokens after the first ones, over the time from those to the last."""
        if self.first_token_at_s is None or self.last_token_at_s is None:
            return None
        elapsed_s = self.last_token_at_s - self.first_token_at_s
        return (self.n_output - self._n_first) / elapsed_s if elapsed_s > 0 else None


def _draft_row(counts: wire.DraftCounts) -> DraftRow:
    return DraftRow(
        source=counts.source.value,
        drafts=counts.n_drafts,
        drafted_tokens=counts.n_drafted,
        accepted_tokens=counts.n_accepted,
        seconds=counts.seconds,
    )


_NUMBERS = itertools.count(1)

KEEP_ENDED_S = 60.0
MAX_ENDED = 100


def unknown_request(job_id: str) -> NotFound:
    """There is none with this id, or it is not the business of whoever asks."""
    return NotFound(
        f"request '{job_id}' is not known; ended requests are kept for {KEEP_ENDED_S:.0f} seconds "
        f"(GET /localrun/v1/requests lists them)"
    )


class Registry:
    """Jobs by id. `idle` is set while none is active."""

    def __init__(self) -> None:
        self._active: dict[str, Job] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._ended: deque[RequestRecord] = deque()
        # Requests outside of the lane `batch`: how many are active, and when the last one ended.
        self._n_awaited = 0
        self._awaited_until_s = -math.inf

    def quiet_s(self) -> float:
        """Seconds since anybody waited for an answer, batches aside; 0 while somebody does."""
        return 0.0 if self._n_awaited else time.monotonic() - self._awaited_until_s

    def new_id(self) -> str:
        """An id that no request of this machine had before."""
        return f"req_{uuid.uuid4().hex}"

    def add(self, job: Job) -> None:
        self._active[job.id] = job
        self._n_awaited += job.record.lane is not wire.Lane.BATCH
        self.idle.clear()

    def ended(self, record: RequestRecord) -> None:
        """A job's record became final."""
        if self._active.pop(record.id, None) is not None:
            self._ended.append(record)
            if len(self._ended) > MAX_ENDED:
                self._ended.remove(self._dispensable())
            if record.lane is not wire.Lane.BATCH:
                self._n_awaited -= 1
                self._awaited_until_s = time.monotonic()
        if not self._active:
            self.idle.set()

    def cancel(self, job_id: str) -> bool:
        """Asks a job to end. False when there is no such active job."""
        job = self._active.get(job_id)
        if job is None:
            return False
        job.request_cancel()
        return True

    def cancel_or_raise(self, job_id: str) -> None:
        """As `cancel`. Raises NotFound for an unknown id, Conflict for a job that has ended."""
        if self.cancel(job_id):
            return
        row = self.row(job_id)
        raise Conflict(f"request '{job_id}' has ended already ({row.state.value}); there is nothing to cancel")

    def row(self, job_id: str) -> RequestRow:
        """One request's row. Raises NotFound."""
        now_s = time.monotonic()
        job = self._active.get(job_id)
        if job is not None:
            return self._row(job, now_s)
        for record in self._recent(now_s):
            if record.id == job_id:
                return record.row(now_s)
        raise unknown_request(job_id)

    def rows(self) -> list[RequestRow]:
        """All rows, oldest first."""
        now_s = time.monotonic()
        rows = [(record.arrived_at_s, record.row(now_s)) for record in self._recent(now_s)]
        rows += [(job.arrived_at_s, self._row(job, now_s)) for job in self._active.values()]
        rows.sort(key=lambda pair: pair[0])
        return [row for _, row in rows]

    def count(self, *states: RequestState) -> int:
        """Active requests in one of these states."""
        return sum(job.record.state in states for job in self._active.values())

    def counts_by_engine(self, *states: RequestState) -> Counter[str]:
        """Active requests in one of these states, by the name that their engine was loaded under."""
        return Counter(job.record.engine for job in self._active.values() if job.record.state in states)

    def _dispensable(self) -> RequestRecord:
        """The oldest of whoever has most: nobody's go for another's."""
        ((most, _),) = Counter(record.key for record in self._ended).most_common(1)
        return next(record for record in self._ended if record.key == most)

    def _recent(self, now_s: float) -> list[RequestRecord]:
        while self._ended and (self._ended[0].ended_at_s or 0.0) < now_s - KEEP_ENDED_S:
            self._ended.popleft()
        return list(self._ended)

    def _row(self, job: Job, now_s: float) -> RequestRow:
        record, link = job.record, job.link
        if record.engine_request_id is None or link is None or record.state is not RequestState.QUEUED:
            return record.row(now_s)
        return record.row(
            now_s,
            queue_position=link.queue_position(record.engine_request_id),
            predicted_wait_s=link.predicted_wait_s(record.engine_request_id, now_s),
        )
