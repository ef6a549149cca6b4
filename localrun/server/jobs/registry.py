"""Makes jobs, and knows which requests there are: the active ones, and those that ended lately.

Runs in the daemon's event loop. A job is in the registry from the moment it is made, so that one which waits for a
model to load can be seen and cancelled; when it ends its record is frozen, and at most `MAX_ENDED` of those are kept
for `KEEP_ENDED_S`.
Does not: talk to the engine, hold the text, or build the whole snapshot (telemetry.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from localrun import wire
from localrun.config import Settings
from localrun.errors import Conflict, NotFound, Unavailable
from localrun.server.engines.faults import Quarantine
from localrun.server.engines.resident import Lender, Link
from localrun.server.jobs.generation import Generation, new_id
from localrun.server.jobs.job import Job, JobRequest, Names, Observer, Recorder
from localrun.snapshot import RequestRow, RequestState

KEEP_ENDED_S = 60.0
MAX_ENDED = 100


def unknown_request(job_id: str) -> NotFound:
    """There is none with this id, or it is not the business of whoever asks."""
    return NotFound(
        f"request '{job_id}' is not known; ended requests are kept for {KEEP_ENDED_S:.0f} seconds "
        f"(GET /localrun/v1/requests lists them)"
    )


class Registry:
    """Jobs by id. `idle` is set while none is active. `node_of` says where requests for a model are computed that the
    cluster has on none of its nodes."""

    def __init__(self, node_of: Callable[[str], str] = lambda model: "") -> None:
        self._node_of = node_of
        self._active: dict[str, Job] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self._ended: deque[Generation] = deque()
        # Requests outside of the lane `batch`: how many are active, and when the last one ended.
        self._n_awaited = 0
        self._awaited_until_s = -math.inf

    def quiet_s(self) -> float:
        """Seconds since anybody waited for an answer, batches aside; 0 while somebody does."""
        return 0.0 if self._n_awaited else time.monotonic() - self._awaited_until_s

    def add(self, job: Job) -> None:
        self._active[job.id] = job
        self._n_awaited += job.record.lane is not wire.Lane.BATCH
        self.idle.clear()

    def ended(self, record: Generation) -> None:
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

    def cancel(self, job_id: str) -> None:
        """Asks a job to end. Raises NotFound for an unknown id, Conflict for a job that has ended."""
        if job_id not in self._active:
            state = self.row(job_id).state.value
            raise Conflict(f"request '{job_id}' has ended already ({state}); there is nothing to cancel")
        self._active[job_id].request_cancel()

    def row(self, job_id: str) -> RequestRow:
        """One request's row. Raises NotFound."""
        now_s = time.monotonic()
        job = self._active.get(job_id)
        if job is not None:
            return self._row(job.record, now_s, job.link)
        for record in self._recent(now_s):
            if record.id == job_id:
                return self._row(record, now_s)
        raise unknown_request(job_id)

    def rows(self) -> list[RequestRow]:
        """All rows, oldest first."""
        now_s = time.monotonic()
        rows = [(record.arrived_at_s, self._row(record, now_s)) for record in self._recent(now_s)]
        rows += [(job.arrived_at_s, self._row(job.record, now_s, job.link)) for job in self._active.values()]
        rows.sort(key=lambda pair: pair[0])
        return [row for _, row in rows]

    def count(self, *states: RequestState) -> int:
        """Active requests in one of these states."""
        return sum(record.state in states for record in self._records())

    def prompt_tokens(self) -> tuple[int, int]:
        """Those of active requests, and how many of them came from the cache."""
        records = self._records()
        return sum(record.n_prompt or 0 for record in records), sum(record.n_cached or 0 for record in records)

    def counts_by_engine(self, *states: RequestState) -> Counter[str]:
        """Active requests in one of these states, by the name that their engine was loaded under."""
        return Counter(record.engine for record in self._records() if record.state in states)

    def counts_by_node(self, *states: RequestState) -> Counter[tuple[str, str]]:
        """Those on nodes of the cluster, by model and node."""
        return Counter((each.engine, each.node) for each in self._records() if each.node and each.state in states)

    def tokens_per_s_on_nodes(self, now_s: float) -> float:
        """What nodes of the cluster write for requests of this daemon."""
        return sum(each.tokens_per_s(now_s) or 0.0 for each in self._records() if each.node)

    def _records(self) -> list[Generation]:
        return [job.record for job in self._active.values()]

    def _dispensable(self) -> Generation:
        """The oldest of whoever has most: nobody's go for another's."""
        ((most, _),) = Counter(record.key for record in self._ended).most_common(1)
        return next(record for record in self._ended if record.key == most)

    def _recent(self, now_s: float) -> list[Generation]:
        while self._ended and (self._ended[0].ended_at_s or 0.0) < now_s - KEEP_ENDED_S:
            self._ended.popleft()
        return list(self._ended)

    def _row(self, record: Generation, now_s: float, link: Link | None = None) -> RequestRow:
        request_id = record.engine_request_id
        if request_id is None or link is None or record.state is not RequestState.QUEUED:
            row = record.row(now_s)
        else:
            position, wait_s = link.queue_position(request_id), link.predicted_wait_s(request_id, now_s)
            row = record.row(now_s, queue_position=position, predicted_wait_s=wait_s)
        row.node = row.node or self._node_of(row.model)
        return row


@dataclass(kw_only=True)
class Jobs:
    """Makes the jobs of a daemon."""

    settings: Settings
    registry: Registry
    names: Names
    lender: Lender
    observer: Observer
    recorder: Recorder
    is_stopping: Callable[[], bool]
    quarantine: Quarantine = field(default_factory=Quarantine)

    def new(self, ask: JobRequest) -> Job:
        """A new job, seen by the registry from now on. Enter it, or it stays there. Raises Unavailable at shutdown,
        and BadRequest for the name of a tier: which model that is was to be found out before (routing.py)."""
        if self.is_stopping():
            raise Unavailable("localrun is shutting down")
        if self.settings.tiers:
            self.names.check_one(ask, ask.model, draft=ask.draft)
        job = Job(
            new_id(), ask, names=self.names, lender=self.lender, observer=self.observer, quarantine=self.quarantine,
            resumes=self.settings.resume == "on", recorder=self.recorder,
        )  # fmt: skip
        self.registry.add(job)
        return job
