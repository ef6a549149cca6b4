"""Who has their steps in the pool beside the streams: requests that are longer than a stream, and their guests.

Streams and the pool are two contexts, and a step of each reads all weights. So while a long request answers there, the
streams' requests join it as guests, and all have one step. Guests go home to a stream when a prompt comes, for a batch
of the background would hold them up, when cells run short, or when the last long request has ended.

Owner: the engine's main thread. While the background is busy nobody comes or goes.
Does not: copy (`cache.py`), or say who is too long (`admission.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from localrun.engine.cache.cache import SCARCE_PART, Cache
from localrun.engine.request import Request
from localrun.engine.schedule.admission import is_too_long
from localrun.engine.schedule.background import BackgroundPrefill
from localrun.engine.schedule.scheduler import Scheduler, is_stream
from localrun.engine.speculate.speculation import Speculation

# A guest comes for at least so many steps, and is expected to stay for so many at most: somebody's prompt may come.
LEAST_STEPS, MOST_STEPS = 16, 64


class Pool:
    """See the module. `preempt` takes a request off its slot."""

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        background: BackgroundPrefill,
        speculation: Speculation,
        preempt: Callable[[Request], None],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._background = background
        self._speculation = speculation
        self._preempt = preempt

    def take_outgrown(self) -> None:
        """Requests that outgrow their streams go on in the pool. While it computes they wait for that at the very end,
        and where it has no room in the queue."""
        near_tokens, n_cells = self._cache.near_tokens, self._cache.cells.n_cells
        for request in [request for request in self._scheduler.running if len(request.tokens) > near_tokens]:
            fits = request.n_tokens + request.n_left <= n_cells
            if request.is_long or request in self._background or fits:
                continue
            is_busy, is_full = self._background.is_busy, request.n_tokens > n_cells
            if not is_busy and self._take(request, is_urgent=is_full):
                request.is_held = False
            elif is_full:
                request.is_held = is_busy
                if not is_busy:
                    self._preempt(request)

    def arrange_guests(self) -> None:
        """Let requests join those in the pool, one at a time, or send them home."""
        running = self._scheduler.running
        if self._background.is_busy or not any(request.is_long for request in running):
            return
        long = [request for request in running if request.is_long]
        guests = [request for request in long if not is_too_long(request, self._cache)]
        hosts = [request for request in long if request not in guests and is_stream(request)]
        n_free, n_cells = self._cache.pool.n_free, self._cache.pool.n_cells
        if self._background.has_prompts or self._scheduler.waiting or not hosts or n_free < n_cells // SCARCE_PART:
            for guest in guests:
                self._send_home(guest)
            return
        adapter_hashes = {host.adapters.hash for host in hosts}
        others = [request for request in running if not request.is_long and request.adapters.hash in adapter_hashes]
        if not others or not all(map(self._can_join, others)):
            return  # a step of those that stay reads the weights anyway
        n_tokens = sum(request.n_tokens for request in others)
        n_steps = min(max(host.n_left for host in hosts), *(request.n_left for request in others), MOST_STEPS)
        is_roomy = n_free - n_tokens >= 2 * n_cells // SCARCE_PART
        if is_roomy and n_steps >= LEAST_STEPS and self._pays(n_steps, len(others), n_tokens):
            self._take(others[0], is_urgent=False)

    def _can_join(self, request: Request) -> bool:
        """Whether a request's answer is under way, with nothing that would have to come along."""
        is_plain = not request.chunks and not self._speculation.has_drafter(request)
        return is_plain and request.n_output > 0 and is_stream(request)

    def _pays(self, n_steps: int, n_rows: int, n_tokens: int) -> bool:
        """Whether a step of the streams takes longer than so many rows among the cells of the pool, by so much that the
        copies there and back are worth it."""
        attend_s = n_rows * (self._cache.pool.span + n_tokens) * self._cache.attend_s
        copy_s = 2 * n_tokens * self._cache.tiers.copy_s_per_token
        return n_steps * (self._scheduler.budget.decode_s - attend_s) > copy_s

    def _take(self, request: Request, *, is_urgent: bool) -> bool:
        """Move a request into the pool, if there is room; unless it `is_urgent`, only if nobody would feel it."""
        assert request.seq is not None
        seq = self._cache.move_to_pool(request.seq, is_urgent=is_urgent)
        if seq is None:
            return False
        self._speculation.drop(request)
        self._scheduler.move(request, seq)
        self._scheduler.enter_pool(request)
        return True

    def _send_home(self, guest: Request) -> None:
        """Once nobody feels it, and its last row was read."""
        assert guest.seq is not None
        seq = None if guest.sits_out else self._cache.try_move_to_stream(guest.seq)
        if seq is not None:
            self._scheduler.move(guest, seq)
            self._scheduler.leave_pool(guest)
