"""Who gets how many tokens of the next step. Pure: no backend, no clock.

Every request has computed tokens that catch up with its known tokens. A step grants each running request some of what
is pending. Chunked prefill, prefix cache hits and the return from preemption are all this one rule. Decodes always come
first; then the prompts share the budget (`policy.py`). The step's latency target is the smallest among the streams that
have one.

Invariant: a request is in exactly one of `waiting` and `running`, or ended.
Does not: order or weigh requests itself (`policy.py`), or predict (`waits.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localrun.engine.backend import Batch
from localrun.engine.cache.tree import Key, common_prefix
from localrun.engine.request import Request
from localrun.engine.schedule.budget import TILE_ROWS, Budget
from localrun.engine.schedule.policy import LANE_RANKS, Policy, Want, deal
from localrun.engine.schedule.waits import Waits
from localrun.errors import QueueFull

# A shared prefix below this is just a template's first words: computing it twice is cheaper than waiting a step.
SHARED_PREFIX_TOKENS = 32
# While the queue does not change, expected waits are reported this often.
QUEUE_NEWS_S = 0.5


class Grant(NamedTuple):
    """`n_tokens` of the request's pending tokens are computed in this step, and then `drafts`: guesses of the tokens
    that follow (`speculate/`)."""

    request: Request
    n_tokens: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """Grants in row order. `n_prefill_rows`, `n_decode_rows`, one for each stream, and `n_draft_rows` add up to all
    rows. `is_steady`: every running request has one token, and none is the first of its answer, so the next plan is
    the same if nothing changes, but for its drafts."""

    grants: tuple[Grant, ...]
    n_prefill_rows: int
    n_decode_rows: int
    is_steady: bool = False
    n_draft_rows: int = 0

    @property
    def n_rows(self) -> int:
        return self.n_prefill_rows + self.n_decode_rows + self.n_draft_rows

    @property
    def depth(self) -> float:
        """How deep in their requests the rows begin, on average over the rows; 0 without prompt rows."""
        if not self.n_prefill_rows:
            return 0.0
        return sum(grant.request.n_computed * grant.n_tokens for grant in self.grants) / self.n_rows


NOTHING = StepPlan((), 0, 0)


def fill_batch(batch: Batch, grants: Sequence[Grant], *, wants_logits: bool = True) -> list[int]:
    """Fill in the rows of `grants`, one after another from row 0. Returns the sequence of each row.

    With `wants_logits`, the last row of each request that catches up in this batch wants its logits, and so does every
    draft.
    """
    row, rows = 0, []
    for request, n_tokens, drafts in grants:
        n_rows, first = n_tokens + len(drafts), request.n_computed
        end = row + n_rows
        assert request.seq is not None
        batch.token[row:end] = [*request.tokens[first : first + n_tokens], *drafts]
        batch.pos[row:end] = range(first, first + n_rows)
        batch.seq[row:end] = request.seq
        batch.wants_logits[row:end] = 0
        batch.wants_logits[row + n_tokens - 1 : end] = wants_logits and n_tokens == request.n_pending
        rows += [request.seq] * n_rows
        row = end
    return rows


class Rows:
    """The rows of the streams' batch; they are reused from step to step as long as the plan is."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._plan = NOTHING
        self._seqs: list[int] = []

    def fill(self, batch: Batch, plan: StepPlan) -> list[int]:
        """Fill in the rows of a plan. Returns the sequence of each."""
        if plan is self._plan and batch is self._batch and plan.is_steady and not plan.n_draft_rows:
            # A decoding request has one pending token, its last.
            batch.token[: plan.n_rows] = [grant.request.tokens[-1] for grant in plan.grants]
            batch.pos[: plan.n_rows] = [grant.request.n_computed for grant in plan.grants]
        else:
            self._batch, self._plan = batch, plan
            self._seqs = fill_batch(batch, plan.grants)
        return self._seqs


class QueueNews(NamedTuple):
    """Waiting request ids, next first, and the seconds until each is expected to have its first token; None if
    unknown."""

    ids: list[int]
    waits_s: list[float] | None


class Scheduler:
    """See the module. `n_slots` requests run at once, `max_queue` may wait."""

    def __init__(self, *, n_slots: int, max_queue: int, budget: Budget) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.policy = Policy()
        self.budget = budget
        self.waits = Waits()
        self._max_queue = max_queue
        self._free_slots = list(reversed(range(n_slots)))
        self._queue_sent = QueueNews([], None)
        self._has_queue_changed = False
        self._queue_due_s = 0.0
        self._is_prompts_turn = False
        self._steady: StepPlan | None = None
        # The last step with streams in it.
        self._step_s, self._step_ended_at_s = 0.0, -math.inf

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def check_queue(self) -> None:
        """Raises QueueFull if no more requests may wait; clients may retry once the waiting ones have started. A
        request that gets a free slot at the next step does not count as waiting."""
        n_waiting = len(self.waiting) - len(self._free_slots)
        if n_waiting < self._max_queue:
            return
        waits_s = self._queue_sent.waits_s
        waiting = "1 request waits" if n_waiting == 1 else f"{n_waiting} requests wait"
        raise QueueFull(
            f"{waiting} for a slot, which is the limit (--max-queue)",
            retry_after_s=max(waits_s) if waits_s else 1.0,
        )

    def too_late(
        self, request: Request, deadline_s: float | None, match: Callable[[Key], int], *, now_s: float
    ) -> QueueFull | None:
        """Why a new request is not worth taking: its first token is expected later than `deadline_s` from now. None if
        it is. `match` says how much of a prompt the cache has."""
        if deadline_s is None:
            return None
        self.policy.enter(request.client)
        order = self.policy.order([*self.waiting, request], now_s)
        self.policy.leave(request.client)
        ahead = order[: order.index(request) + 1]
        known_rows = {request.id: request.n_tokens - match(request.key)}
        waits_s = self.waits.first_tokens_s(
            self.running, ahead, n_free_slots=len(self._free_slots), known_rows=known_rows
        )
        alone_s = self.waits.first_tokens_s([], [request], n_free_slots=1, known_rows=known_rows)
        wait_s, own_s = (waits_s[-1], alone_s[-1]) if waits_s and alone_s else (0.0, 0.0)
        if wait_s <= deadline_s:
            return None
        return QueueFull(
            f"the first token is expected in {wait_s:.1f} s ({own_s:.1f} s of them for the prompt itself), later than "
            f"the deadline of {max(0.0, deadline_s):.1f} s from now; ask later, or with a longer deadline",
            retry_after_s=min(wait_s - own_s, wait_s - deadline_s),
        )

    def submit(self, request: Request) -> None:
        """A new request waits from now on. For what it was given on another engine its client is charged here."""
        self.waiting.append(request)
        self.policy.enter(request.client)
        if request.was_started:
            self.policy.charge(request.client, n_prefill=request.n_prompt - request.n_cached, n_output=request.n_output)
        self._has_queue_changed = True

    def next_up(self, now_s: float) -> list[Request]:
        """Waiting requests, next first; nobody while there is no slot to have."""
        if not self._free_slots:
            lowest = max(request.rank for request in self.running)
            if not lowest or all(LANE_RANKS[request.lane] >= lowest for request in self.waiting):
                return []
        return self.policy.order(self.waiting, now_s)

    def can_start(self, request: Request) -> bool:
        """Whether there is a slot for a waiting request, free or held by a lower lane."""
        return bool(self._free_slots) or LANE_RANKS[request.lane] < max(other.rank for other in self.running)

    def outranked(self, request: Request) -> list[Request]:
        """Running requests that a waiting one may preempt, the first to go last: of the lowest rank, the youngest."""
        return self.policy.outranked(self.running, request.lane)

    def queue_news(self, now_s: float) -> QueueNews | None:
        """Who waits, and for how long, if that is news."""
        is_due = bool(self.waiting) and now_s >= self._queue_due_s
        if not self._has_queue_changed and not is_due:
            return None
        order = self.policy.order(self.waiting, now_s)
        news = QueueNews([request.id for request in order], self._waits_s(order))
        self._has_queue_changed = False
        if news.ids == self._queue_sent.ids and not is_due:
            return None
        self._queue_sent, self._queue_due_s = news, now_s + QUEUE_NEWS_S
        return news

    def start(self, request: Request, seq: int, n_cached: int, now_s: float) -> None:
        """A waiting request runs from now on in `seq`, which holds its first `n_cached` tokens."""
        self.waiting.remove(request)
        self.running.append(request)
        self._steady = None
        request.seq = seq
        request.slot = self._free_slots.pop()
        request.n_computed = n_cached
        self.policy.start(request, now_s)
        self._has_queue_changed = True
        if not request.was_started:
            request.started_at_s = now_s
            request.n_cached = min(n_cached, request.n_prompt)
            self.policy.charge(request.client, n_prefill=request.n_pending)
            self.waits.observe_start(n_tokens=request.n_tokens, n_cached=n_cached)

    def at(self, seq: int) -> Request:
        """The request that runs in this sequence."""
        return next(request for request in self.running if request.seq == seq)

    def move(self, request: Request, seq: int) -> None:
        """A running request continues in another sequence."""
        request.seq = seq
        self._steady = None

    def charge_outputs(self, clients: Iterable[str]) -> None:
        """Charge one token of output to each of these clients, once per request."""
        for client, n_output in Counter(clients).items():
            self.policy.charge(client, n_output=n_output)

    def preempt(self, request: Request, now_s: float) -> None:
        """A running request waits again; it keeps its tokens and comes back through `start`."""
        self._leave_slot(request)
        request.n_computed = 0
        self.policy.preempt(request, now_s)
        self.waiting.append(request)
        self._has_queue_changed = True

    def end(self, request: Request) -> None:
        """A request, waiting or running, is over."""
        if request.seq is None:
            self.waiting.remove(request)
            self._has_queue_changed = True
        else:
            if request.n_output == 0:  # the part of its prompt that was not computed
                self.policy.charge(request.client, n_prefill=-request.n_pending)
            self._leave_slot(request)
        if request.was_started:
            self.waits.observe_end(n_output=request.n_output, is_cut=request.n_output >= request.max_output)
        self.policy.leave(request.client)

    def victim(self) -> Request:
        """The running request to preempt when cells run out."""
        return self.policy.victim(self.running)

    def leader(self, request: Request, n_matched: int) -> tuple[Request, int] | None:
        """The running request that is computing a longer prefix of this prompt than the cache has now, and the length
        of that prefix.

        Two prompts never both compute a shared prefix: the second waits until the first has it.
        """
        limit = request.n_tokens - 1
        for other in self.running:
            if not other.is_prefilling or other.n_computed >= limit:
                continue
            shared = common_prefix(other.tokens, request.tokens, 0, limit)
            if shared >= SHARED_PREFIX_TOKENS and n_matched < shared and other.n_computed < shared:
                return other, shared
        return None

    def steady_plan(self) -> StepPlan | None:
        """The previous plan, if it still holds: all running requests are streams in it and wait for one token each.
        None otherwise."""
        plan = self._steady
        if plan is None or any(
            len(request.tokens) - request.n_computed != 1 or request.is_away for request, _, _ in plan.grants
        ):
            return None
        return plan

    def plan(self, *, n_free: int, left_s: float | None = None) -> StepPlan:
        """Plan the next step within `n_free` cells. A plan without rows although requests run, or with fewer decode
        rows than decoding requests, is short of cells (`is_short`). Rows are in order of sequence, which suits split
        streams.

        With `left_s`, the seconds until streams should have their next token, prompts and streams are never in one
        step: prompts get the time until then, and at least one turn after each of the streams'.
        """
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            if not request.is_away:
                (decoding if request.n_pending == 1 else prefilling).append(request)
        decoding.sort(key=_by_seq)
        streams = [Grant(request, 1) for request in decoding[:n_free]]
        n_decode = len(streams)
        if not prefilling:
            is_steady = 0 < n_decode == len(self.running) and all(request.n_output for request in decoding)
            plan = StepPlan(tuple(streams), 0, n_decode, is_steady)
            self._steady = plan if is_steady else None
            return plan
        prefilling.sort(key=_by_seq)
        is_together = left_s is None and n_decode > 0
        rows = self._prompt_rows(decoding, prefilling, left_s)
        given = deal(_wants(prefilling), min(rows, n_free - n_decode))
        if not is_together:
            given = _whole(prefilling, given)
            if any(given):
                streams, n_decode = [], 0
        grants = [Grant(request, n_rows) for request, n_rows in zip(prefilling, given, strict=True) if n_rows]
        return StepPlan((*streams, *grants), sum(given), n_decode)

    def _prompt_rows(self, decoding: list[Request], prefilling: list[Request], left_s: float | None) -> int:
        """Prompt rows of this step; without `left_s` they join the streams' rows."""
        depth = sum(request.n_computed for request in prefilling) / len(prefilling)
        if left_s is None or not decoding:
            rows = self.budget.prefill_rows(n_decode=len(decoding), depth=depth, target_s=_target_s(decoding))
        else:
            rows = self.budget.rows_until(depth=depth, left_s=left_s) or (
                self.budget.least_rows(depth) if self._is_prompts_turn else 0
            )
        if rows == 0 or (left_s is None and decoding):
            return rows
        shortest = min(request.n_grantable for request in prefilling)
        if shortest <= TILE_ROWS and (
            left_s is None
            or not decoding
            or self.budget.is_better_whole(shortest, part_rows=rows, depth=depth, left_s=left_s)
        ):
            rows = max(rows, shortest)
        return min(rows, self.budget.batch_rows)

    @property
    def target_s(self) -> float | None:
        """The inter-token time that streams want, in seconds; 0 if none has a target, None without streams."""
        streams = [request for request in self.running if request.n_pending == 1 and not request.is_away]
        return _target_s(streams) if streams else None

    def due_in_s(self, now_s: float) -> float:
        """Seconds until streams should have their next step, early enough for their next token. Prompts without streams
        take turns with the background. Infinite if no stream has a target, and if no request takes part in steps.

        Two steps are always at least one step's duration apart, because a shorter target would starve all others.
        """
        target_s = self.target_s
        if target_s == 0 or all(request.is_away for request in self.running):
            return math.inf
        return self._step_ended_at_s + max((target_s or 0.0) - self._step_s, self._step_s) - now_s

    def is_turn_near(self, now_s: float, within_s: float) -> bool:
        """Whether streams with a target have a step so soon that work of `within_s` would make them late."""
        return bool(self.target_s) and self.due_in_s(now_s) < within_s

    def observe(self, plan: StepPlan, *, depth: float, step_s: float, ended_at_s: float) -> None:
        """A planned step took `step_s` seconds; its prompt rows began `depth` tokens deep."""
        n_prefill, n_decode = plan.n_prefill_rows, plan.n_decode_rows
        if not plan.n_draft_rows:  # such a step says little about others, for it gives more tokens and takes longer
            self.budget.observe(n_decode=n_decode, n_prefill=n_prefill, depth=depth, step_s=step_s)
            self.waits.observe_step(n_decode=n_decode, n_prefill=n_prefill, step_s=step_s)
        self._is_prompts_turn = n_decode > 0
        if n_decode:
            self._step_s, self._step_ended_at_s = step_s, ended_at_s

    def observe_background(self, *, n_rows: int, seconds: float) -> None:
        """A batch of the background took `seconds`, without pauses."""
        self.waits.observe_step(n_decode=0, n_prefill=n_rows, step_s=seconds)

    def is_short(self, plan: StepPlan) -> bool:
        """Whether `plan` leaves out a stream, or everyone, for lack of cells."""
        here = [request for request in self.running if not request.is_away]
        n_decoding = 0 if plan.n_prefill_rows and not plan.n_decode_rows else sum(r.n_pending == 1 for r in here)
        return plan.n_decode_rows < n_decoding or (plan.n_rows == 0 and bool(here))

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        self._steady = None
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None
        request.seq = None

    def _waits_s(self, order: list[Request]) -> list[float] | None:
        return self.waits.first_tokens_s(self.running, order, n_free_slots=len(self._free_slots), known_rows={})


def _by_seq(request: Request) -> int:
    assert request.seq is not None
    return request.seq


def _wants(prompts: Sequence[Request]) -> list[Want]:
    return [Want(request.n_grantable, request.client, request.rank) for request in prompts]


def _whole(prompts: Sequence[Request], given: list[int]) -> list[int]:
    """Drop parts of short prompts if others finish: a pass for a part costs nearly as much as a whole one."""
    pairs = list(zip(prompts, given, strict=True))
    if not any(n_rows == request.n_grantable for request, n_rows in pairs):
        return given
    return [0 if n_rows < request.n_grantable <= TILE_ROWS else n_rows for request, n_rows in pairs]


def _target_s(decoding: Iterable[Request]) -> float:
    """The inter-token time that a step must keep: the shortest that a stream asks for, or 0."""
    return min((request.target_itl_s for request in decoding if request.target_itl_s), default=0.0)
