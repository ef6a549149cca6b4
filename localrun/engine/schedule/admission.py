"""Which requests may wait, and which may start now: the next in line get slots and cells, if need be from lower lanes;
and who has their cells in the pool beside the streams.

Owner: the engine's main thread. Time is passed in.
Does not: order the queue (`scheduler.py`), copy (`cache.py`), or take a request off its slot itself: the engine's
`preempt` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from localrun.engine.backend import BASE, AdapterSet, Backend
from localrun.engine.cache.cache import SCARCE_PART, Cache
from localrun.engine.cache.tree import PrefixKey
from localrun.engine.request import Request, check, new_request
from localrun.engine.sample.text import Prompt
from localrun.engine.schedule.background import BackgroundPrefill
from localrun.engine.schedule.scheduler import SHARED_PREFIX_TOKENS, Scheduler, is_stream
from localrun.wire import Submit

# Cells that every running stream must still be able to take before another request may start. A new request that only
# just fits would be preempted a few steps later.
HEADROOM_CELLS = 32
# Where there are no streams, whoever comes next may have to wait for so many times the usual target.
ALONE = 3


class Admitted(NamedTuple):
    """A request that has just got a slot. `is_first`: it never had one before."""

    request: Request
    is_first: bool


class _Reason(NamedTuple):
    """Why a request was passed over last time. It waits for `leader`, which had been preempted `n_preempted` times, to
    compute `until` tokens; or, with `leader` None, it waits for the background, with `n_matched` tokens in the cache.

    While the reason holds, the prompt is not matched again: that takes time by its length, for every waiting request,
    in every step.
    """

    leader: Request | None
    n_preempted: int
    until: int
    n_matched: int


class Admission:
    """See the module. `target_itl_s` and `adapters` are those of requests that do not name their own."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        background: BackgroundPrefill,
        preempt: Callable[[Request], None],
        *,
        target_itl_s: float,
        adapters: AdapterSet = BASE,
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._background = background
        self._preempt = preempt
        self._target_itl_s = target_itl_s
        self._adapters = adapters
        self._passed_over: dict[Request, _Reason] = {}
        # Whether a long request before those that are looked at waits until prompts leave the pool.
        self._awaits_prompts = False
        # By depth, while requests that wait are looked at and none is started.
        self._direct_tokens: dict[int, int] = {}

    def take(self, submit: Submit, prompt: Prompt, match: Callable[[PrefixKey], int], *, now_s: float) -> Request:
        """Take a new request, which waits from now on. Raises BadRequest, ContextExceeded or QueueFull if it may not.
        `match` says how much of a prompt the cache has."""
        check(submit, prompt, self._backend)
        is_resumed = submit.resume is not None
        if not is_resumed:
            self._scheduler.check_queue()
        request = new_request(submit, prompt, self._backend, target_itl_s=self._target_itl_s, adapters=self._adapters)
        late = None if is_resumed else self._scheduler.too_late(request, submit.deadline_s, match, now_s=now_s)
        if late is not None:
            request.sampler.close()
            raise late
        if request.was_started:
            self._scheduler.policy.preempt(request, now_s)
        self._scheduler.submit(request)
        return request

    def goes_to_background(self, n_new: int, depth: int) -> bool:
        """Whether a prompt with `n_new` tokens to compute, from `depth` on, is computed in the background. Without
        streams, nobody is held up by a few tokens or by the last ones of a long prompt, and they are done sooner
        without two copies and a step for the last token."""
        return self._background.is_there and self._background.takes(n_new, self._n_direct(depth))

    def _n_direct(self, depth: int) -> int:
        target_s, budget = self._scheduler.target_s, self._scheduler.budget
        if target_s is None:
            return budget.direct_tokens(ALONE * self._target_itl_s)
        return budget.direct_tokens(target_s or self._target_itl_s, depth)

    def start(self, cache: Cache, now_s: float) -> Iterator[Admitted]:
        """Start waiting requests while slots and cells last, next first. A later one may take the slot that an earlier
        one was just given."""
        reasons, self._passed_over = self._passed_over, {}
        self._awaits_prompts = lacks_cells = False
        self._direct_tokens.clear()
        if not self._scheduler.waiting:
            return
        for request in self._scheduler.next_up(now_s):
            if request.awaits_something or request.skips_steps or not self._scheduler.can_start(request):
                continue
            # Their rows with logits are all that a step may have.
            if request.is_scoring and any(other.is_scoring for other in self._scheduler.running):
                continue
            reason = reasons.get(request)
            is_long = is_too_long(request, cache)
            # Those who need none of its cells go on, but no other long one overtakes it.
            if is_long and (lacks_cells or not self._could_make_way(request, cache, is_long)):
                self._awaits_prompts |= not lacks_cells and self._is_held_up_by_prompts(request, cache)
                lacks_cells = True
                continue
            if reason is None or not self._holds(reason, request, is_long):
                reason = self._reason(request, cache, is_long)
            if reason is not None:
                self._passed_over[request] = reason
                continue
            could = is_long or self._could_make_way(request, cache, is_long)
            is_next = could and self._make_way(request, cache, is_long)
            is_next = is_next and cache.is_ready(request.key, is_long=is_long)
            lease = cache.acquire(request.key, request.chunk_table, is_long=is_long) if is_next else None
            if lease is None:
                break  # later ones do not overtake it: it waits only for a copy
            is_first = not request.was_started
            self._scheduler.start(request, lease.seq, lease.n_cached, now_s)
            self._direct_tokens.clear()
            self._backend.expect(
                lease.seq, request.sampler, wants_logprobs=request.n_probs is not None or request.is_scoring
            )
            if lease.n_here < lease.n_cached:
                request.n_computed, request.skips_steps = lease.n_here, True
            if lease.seq >= self._backend.n_seqs:
                if lease.n_cached < request.last_start:
                    self._background.add(request)
                else:
                    self._scheduler.enter_pool(request)
            yield Admitted(request, is_first)

    def _reason(self, request: Request, cache: Cache, is_long: bool) -> _Reason | None:
        """Why a request should not start now, although it could."""
        n_matched = cache.match(request.key)
        lead = self._scheduler.leader(request, n_matched)
        if lead is not None:
            leader, n_shared = lead
            if leader.seq is not None and cache.follow(leader.seq, request.key, n_matched):
                # Near the end, waiting may no longer be worth it: then the cache is asked each time.
                return _Reason(leader, leader.n_preempted, n_shared - SHARED_PREFIX_TOKENS, n_matched)
        return _Reason(None, 0, 0, n_matched) if self._awaits_batch(request, n_matched, is_long) else None

    def _holds(self, reason: _Reason, request: Request, is_long: bool) -> bool:
        leader = reason.leader
        if leader is None:
            return self._awaits_batch(request, reason.n_matched, is_long)
        is_same = leader.seq is not None and leader.n_preempted == reason.n_preempted
        return is_same and leader.is_prefilling and leader.n_computed < reason.until

    def _awaits_batch(self, request: Request, n_matched: int, is_long: bool) -> bool:
        """Whether it belongs in the background, whose sequences nobody may touch now, or whose cells are another's."""
        n_new = request.last_start + 1 - n_matched
        if not (self._background.is_busy or self._awaits_prompts):
            return False
        if is_long:
            return True
        if n_matched not in self._direct_tokens:
            self._direct_tokens[n_matched] = self._n_direct(n_matched)
        return self._background.takes(n_new, self._direct_tokens[n_matched])

    @property
    def pooled(self) -> list[Request]:
        """The running requests that have cells in the pool beside the streams."""
        n_streams = self._backend.n_seqs
        return [request for request in self._scheduler.running if request.seq is not None and request.seq >= n_streams]

    def _rivals(self, is_long: bool) -> list[Request]:
        """The running requests that have cells where a new one wants some."""
        return self.pooled if is_long else self._scheduler.running

    def _below(self, request: Request, is_long: bool) -> list[Request]:
        """Whom a new request may take cells from, the first to go last."""
        rivals = self._rivals(is_long)
        return [other for other in self._scheduler.outranked(request) if other in rivals]

    def _could_make_way(self, request: Request, cache: Cache, is_long: bool) -> bool:
        below = self._below(request, is_long)
        n_most = sum(other.n_tokens + HEADROOM_CELLS for other in below)
        is_all = len(below) == len(self._rivals(is_long))
        return is_all or self._n_missing(request, cache, is_long) <= n_most

    def _is_held_up_by_prompts(self, request: Request, cache: Cache) -> bool:
        """Whether a long request would have room beside the long ones that run, but for prompts that leave soon. No
        more of these begin then: there may always be some."""
        stay = [other for other in self.pooled if is_too_long(other, cache)]
        n_wanted = request.n_known + sum(other.n_known for other in stay) + HEADROOM_CELLS * (len(stay) + 1)
        return not stay or n_wanted <= self._backend.n_cells

    def _make_way(self, request: Request, cache: Cache, is_long: bool) -> bool:
        """Whether there is a slot and cells for a new request that could have them; if need be, they are taken from
        lower lanes."""
        below = self._below(request, is_long)
        while self._n_missing(request, cache, is_long) > 0:
            if not below:
                return False
            self._preempt(below.pop())
        if not self._scheduler.has_free_slot:
            self._preempt(self._scheduler.outranked(request)[-1])
        return True

    def _n_missing(self, request: Request, cache: Cache, is_long: bool) -> int:
        """Cells that a new request lacks if every running stream is to keep some to continue; alone, it lacks none."""
        running = self._rivals(is_long)
        if not running:
            return 0
        n_promised = HEADROOM_CELLS * (len(running) + 1)
        if is_long:  # all that is known of the others is counted as theirs
            return request.n_known + n_promised - cache.n_obtainable(request.key, is_long=True)
        n_promised += sum(other.n_pending for other in running)
        return request.n_tokens + n_promised - cache.n_obtainable(request.key, is_long=False)


def is_too_long(request: Request, cache: Cache) -> bool:
    """Whether it is longer than a stream, or soon will be, where there are streams."""
    return cache.outgrows(request.n_known, request.n_left)


# A guest comes for at least so many steps, and is expected to stay for so many at most: somebody's prompt may come.
LEAST_STEPS, MOST_STEPS = 16, 64


class Pool:
    """Who has their steps in the pool beside the streams: requests that are longer than a stream, and their guests.

    Streams and the pool are two contexts, and a step of each reads all weights. So while a long request answers there,
    the streams' requests join it as guests, and all have one step. Guests go home to a stream when a prompt comes, for
    a batch of the background would hold them up, when cells run short, or when the last long request has ended. While
    the background is busy nobody comes or goes.

    `has_drafter` says whether something that follows a request's sequence computes drafts for it, and `drop_drafts`
    that the request leaves that sequence."""

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        background: BackgroundPrefill,
        preempt: Callable[[Request], None],
        has_drafter: Callable[[Request], bool],
        drop_drafts: Callable[[Request], None],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._background = background
        self._preempt = preempt
        self._has_drafter, self._drop_drafts = has_drafter, drop_drafts

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
        is_plain = not request.chunks and not self._has_drafter(request)
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
        self._drop_drafts(request)
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
