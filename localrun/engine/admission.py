"""Who may start now: waiting requests take slots and cells, from lower lanes if that is what it takes.

Owner: the engine's main thread. Time is passed in.
Does not: order the queue (`scheduler.py`), or take a request off its slot itself: that is `preempt`, the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from localrun.engine.backend import Backend
from localrun.engine.pool import Pool
from localrun.engine.request import Request
from localrun.engine.scheduler import Scheduler

# Cells that every running stream must be able to take before another request may start: a newcomer that fits only just
# would be preempted a few steps later.
HEADROOM_CELLS = 32


class Admitted(NamedTuple):
    """A request that has a slot now. `is_first`: it never had one before."""

    request: Request
    is_first: bool


class Admission:
    """See the module."""

    def __init__(self, backend: Backend, scheduler: Scheduler, preempt: Callable[[Request], None]) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._preempt = preempt

    def start(self, pool: Pool, now_s: float) -> Iterator[Admitted]:
        """Start waiting requests while slots and cells last, next first. One that comes later may take the slot again
        that an earlier one was given."""
        for request in self._scheduler.next_up(now_s):
            if request.awaits_grammar or not self._scheduler.can_start(request):
                continue
            n_matched = pool.match(request.tokens)
            leader = self._scheduler.leader(request, n_matched)
            if leader and leader.seq is not None and pool.follow(leader.seq, request.tokens, n_matched):
                continue
            if pool.must_wait(request.tokens, n_matched):
                continue
            lease = pool.acquire(request.tokens) if self._make_way(request, pool) else None
            if lease is None:
                break
            is_first = not request.was_started
            self._scheduler.start(request, lease.seq, lease.n_cached, now_s)
            # Asked each time: one pool has more sequences than split streams have.
            request.is_staged = lease.seq >= self._backend.n_seqs
            yield Admitted(request, is_first)

    def _make_way(self, request: Request, pool: Pool) -> bool:
        """Whether there is a slot and cells for a newcomer, taken from lower lanes if that is what it takes."""
        below = self._scheduler.outranked(request)
        n_most = sum(other.n_tokens + HEADROOM_CELLS for other in below)
        if self._n_missing(request, pool) > n_most and len(below) < len(self._scheduler.running):
            return False
        while not self._scheduler.has_free_slot or self._n_missing(request, pool) > 0:
            if not below:
                return False
            self._preempt(below.pop())
        return True

    def _n_missing(self, request: Request, pool: Pool) -> int:
        """Cells that a newcomer lacks if every running stream is to have some to go on; alone, a request lacks none."""
        running = self._scheduler.running
        if not running:
            return 0
        n_promised = sum(other.n_pending for other in running) + HEADROOM_CELLS * (len(running) + 1)
        return request.n_tokens + n_promised - pool.n_obtainable(request.tokens)
