"""What the next message to the daemon says: the news of every request since the last one.

Owner: the engine's main thread. Time is passed in.
Invariant: a request has at most one delta per message, and none after its last.
Does not: decide what happens to a request (`engine.py`), or write pipes (`process.py`).
"""

from __future__ import annotations

from localrun.engine import intake
from localrun.engine.backend import Backend
from localrun.engine.cache.pool import Pool
from localrun.engine.kv_map import KvNews
from localrun.engine.request import Request
from localrun.engine.schedule.scheduler import Scheduler
from localrun.engine.totals import Totals
from localrun.errors import LocalrunError
from localrun.wire import Delta, Started, Step


class News:
    """See the module."""

    def __init__(self, backend: Backend) -> None:
        self._deltas: dict[int, Delta] = {}
        self._started: list[Started] = []
        self._kv = KvNews(backend)
        self._holdings_sent = (0, 0)

    @property
    def has_deltas(self) -> bool:
        """Whether somebody has something to hear about a request."""
        return bool(self._deltas)

    def delta(self, request: Request) -> Delta:
        """The request's entry, with its counters brought up to date."""
        delta = self._deltas.get(request.id)
        if delta is None:
            delta = self._deltas[request.id] = Delta(request.id, request.phase, 0, 0, tokens=[])
        delta.phase, delta.n_computed, delta.n_output = request.phase, request.n_computed, request.n_output
        return delta

    def refuse(self, request_id: int, error: LocalrunError | None, *, n_prompt: int) -> None:
        """A request never starts: its only delta says why; without an error, that it was cancelled."""
        self._deltas[request_id] = intake.refusal(request_id, error, n_prompt=n_prompt)

    def start(self, request: Request) -> None:
        """A request got a slot."""
        assert request.slot is not None
        self._started.append(Started(request.id, request.slot, request.n_prompt, request.n_cached))

    def publish(self, pool: Pool, scheduler: Scheduler, totals: Totals, now_s: float) -> Step | None:
        """All news since the last call as one message, whose step is then over for `totals`; None without news."""
        queue = scheduler.queue_news(now_s)
        n_rows = totals.n_prefill_rows + totals.n_decode_rows
        holdings = (pool.cells.n_used, pool.n_cached_sequences)
        is_news = self._deltas or self._started or n_rows or queue is not None or holdings != self._holdings_sent
        if not is_news:
            return None
        step = Step(
            sent_at_s=now_s,
            deltas=list(self._deltas.values()),
            stats=totals.stats(pool, scheduler),
            started=self._started,
            queue=queue.ids if queue is not None else None,
            waits_s=queue.waits_s if queue is not None else None,
            kv_map=self._kv.since(pool.cells, scheduler.running, now_s),
        )
        totals.end_step()
        self._deltas, self._started, self._holdings_sent = {}, [], holdings
        return step
