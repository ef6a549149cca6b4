"""Who gets how many tokens of the next step. Pure: no backend, no clock.

Every request has computed tokens catching up with known tokens; a step grants each running request some of what is
pending. Chunked prefill, prefix hits and coming back from preemption are that one rule. Order: decodes first, always;
then the prompts, which share the budget, so that a short one never queues behind a long one.

Invariant: a request is in exactly one of `waiting` and `running`, or ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrun.engine.budget import Budget
from localrun.engine.policy import Policy
from localrun.engine.prefix_tree import common_prefix
from localrun.engine.request import Request

# Below this a common beginning is a template's first words: computing it twice is cheaper than waiting a step for it.
SHARED_PREFIX_TOKENS = 32


@dataclass(frozen=True)
class Grant:
    """`n_tokens` of the request's pending tokens are computed in this step."""

    request: Request
    n_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """Grants in row order. `n_prefill_rows` and `n_decode_rows` add up to all rows."""

    grants: tuple[Grant, ...]
    n_prefill_rows: int
    n_decode_rows: int

    @property
    def n_rows(self) -> int:
        return self.n_prefill_rows + self.n_decode_rows


class Scheduler:
    """See the module. `n_slots` requests run at once, `max_queue` may wait."""

    def __init__(self, *, n_slots: int, max_queue: int, budget: Budget) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.policy = Policy()
        self.budget = budget
        self._max_queue = max_queue
        self._free_slots = list(reversed(range(n_slots)))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def is_queue_full(self) -> bool:
        return len(self.waiting) >= self._max_queue

    def submit(self, request: Request) -> None:
        """A new request waits from now on."""
        self.waiting.append(request)
        self.policy.enter(request.client)

    def order(self, now_s: float) -> list[Request]:
        """Waiting requests, next first."""
        return self.policy.order(self.waiting, now_s)

    def start(self, request: Request, seq: int, n_cached: int, now_s: float) -> None:
        """A waiting request runs from now on in `seq`, which holds its first `n_cached` tokens."""
        self.waiting.remove(request)
        self.running.append(request)
        request.seq = seq
        request.slot = self._free_slots.pop()
        request.n_computed = n_cached
        if not request.was_started:
            request.started_at_s = now_s
            request.n_cached = min(n_cached, request.n_prompt)

    def preempt(self, request: Request) -> None:
        """A running request waits again; it keeps its tokens and comes back through `start`."""
        self._leave_slot(request)
        request.n_computed = 0
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        """A request, waiting or running, is over."""
        if request.seq is None:
            self.waiting.remove(request)
        else:
            self._leave_slot(request)
        self.policy.leave(request.client)

    def victim(self) -> Request:
        """The running request to preempt when cells run out."""
        return self.policy.victim(self.running)

    def leader(self, request: Request, n_matched: int) -> Request | None:
        """The running request that is computing a longer beginning of this prompt than the cache has now.

        Two prompts with the same beginning never both compute it: the second waits for the first to get there.
        """
        limit = request.n_tokens - 1
        for other in self.running:
            if not other.is_prefilling or other.n_computed >= limit:
                continue
            shared = common_prefix(other.tokens, request.tokens, 0, limit)
            if shared >= SHARED_PREFIX_TOKENS and n_matched < shared and other.n_computed < shared:
                return other
        return None

    def plan(self, *, n_free: int, span: int) -> StepPlan:
        """The next step within `n_free` cells. Without a row although requests run, or with fewer decode rows than
        decoding requests, it is short of cells (`is_short`)."""
        decoding = [request for request in self.running if not request.is_prefilling]
        grants = [Grant(request, 1) for request in decoding[:n_free]]
        n_decode = len(grants)
        prefilling = [request for request in self.running if request.is_prefilling]
        room = min(self.budget.prefill_rows(n_decode=n_decode, span=span), n_free - n_decode)
        shares = _divide([request.n_pending for request in prefilling], room)
        grants += [Grant(request, share) for request, share in zip(prefilling, shares, strict=True) if share]
        return StepPlan(tuple(grants), sum(shares), n_decode)

    def is_short(self, plan: StepPlan) -> bool:
        """Whether `plan` leaves a stream out, or everybody, for want of cells."""
        n_decoding = sum(not request.is_prefilling for request in self.running)
        return plan.n_decode_rows < n_decoding or (plan.n_rows == 0 and bool(self.running))

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None
        request.seq = None


def _divide(wants: list[int], room: int) -> list[int]:
    """Shares of `room`, as equal as the wants allow; what a short one leaves goes to the longer ones."""
    shares = [0] * len(wants)
    left = max(0, room)
    order = sorted(range(len(wants)), key=wants.__getitem__)
    for n_served, index in enumerate(order):
        shares[index] = min(wants[index], left // (len(wants) - n_served))
        left -= shares[index]
    return shares
