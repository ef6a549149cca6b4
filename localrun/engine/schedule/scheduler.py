"""Who gets how many tokens of the next step. Pure: no backend, no clock.

Every request has computed tokens that catch up with its known tokens. A step grants each running request some of what
is pending. Chunked prefill, prefix cache hits and the return from preemption are all this one rule. Decodes always come
first; then the prompts share the budget (`policy.py`). The step's latency target is the smallest among the streams that
have one. All rows of a step have the same adapters (`AdapterRounds`).

Rows of media never share a step with rows of text: a chunk is a prompt's turn of its own, and the turns of chunks, of
other prompts and of streams alternate. A chunk that is not causal is computed whole, however long that takes.

Invariant: a request is in exactly one of `waiting` and `running`, or ended.
Does not: order or weigh requests itself (`policy.py`), or predict (`budget.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from localrun.engine.backend import BASE, AdapterSet, Batch
from localrun.engine.cache.tree import PrefixKey, common_prefix
from localrun.engine.request import Request
from localrun.engine.schedule.budget import TILE_ROWS, Budget, Waits
from localrun.engine.schedule.policy import (
    LANE_RANKS,
    LOWEST_RANK,
    AdapterRounds,
    Demand,
    Policy,
    TurnOrder,
    share_rows,
)
from localrun.errors import QueueFull

# A shared prefix below this is just a template's first words: computing it twice is cheaper than waiting a step.
SHARED_PREFIX_TOKENS = 32
# Where rounds take longer than their target, which must not be taken for none.
_LEAST_TARGET_S = 1e-6
# While the queue does not change, expected waits are reported this often.
QUEUE_UPDATE_S = 0.5


class Grant(NamedTuple):
    """`n_tokens` of the request's pending tokens are computed in this step, and then `drafts`: guesses of the tokens
    that follow (`speculate/`)."""

    request: Request
    n_tokens: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """Grants in row order. `n_prefill_rows`, `n_decode_rows`, one for each stream, and `n_draft_rows` add up to all
    rows, which have these `adapters`. `is_reusable`: every running request has one token, and none is the first of its
    answer, so the next plan for these adapters is the same if nothing changes, but for its drafts. `is_media`: the only
    grant is rows of a chunk."""

    grants: tuple[Grant, ...]
    n_prefill_rows: int
    n_decode_rows: int
    is_reusable: bool = False
    n_draft_rows: int = 0
    adapters: AdapterSet = BASE
    is_media: bool = False

    @property
    def batch_group(self) -> bytes:
        """Of all of its requests."""
        return self.grants[0].request.batch_group if self.grants else b""

    @property
    def is_long(self) -> bool:
        """Whether it is computed in the pool beside the streams."""
        return bool(self.grants) and self.grants[0].request.is_long

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


def fill_batch(batch: Batch, grants: Sequence[Grant]) -> list[int]:
    """Fill in the rows of `grants`, one after another from row 0. Returns the sequence of each row.

    The last row of each request wants its logits, and so does every draft: the next tokens are drawn from those, and
    the logits of a part of a prompt tell whether its result is finite (`non_finite_requests`). So does every row of a
    prompt whose scores are wanted. All requests have the same adapters."""
    row, rows = 0, []
    batch.adapter_hash = grants[0].request.adapters.hash if grants else b""
    for request, n_tokens, drafts in grants:
        assert request.adapters.hash == batch.adapter_hash, "rows of two sets of adapters in one batch"
        n_rows, first = n_tokens + len(drafts), request.n_computed
        end = row + n_rows
        assert request.seq is not None
        batch.token[row:end] = [*request.tokens[first : first + n_tokens], *drafts]
        batch.pos[row:end] = range(first, first + n_rows)
        batch.seq[row:end] = request.seq - batch.first_seq
        batch.wants_logits[row:end] = 0
        is_scoring = request.scoring is not None and request.is_scoring
        batch.wants_logits[row if is_scoring else row + n_tokens - 1 : end] = 1
        rows += [request.seq] * n_rows
        row = end
    return rows


def non_finite_requests(grants: Iterable[Grant], is_finite: Callable[[int], bool]) -> dict[Request, int]:
    """The requests of a computed batch whose last row has no numbers, and how many tokens they would have now."""
    row, found = -1, {}
    for request, n_tokens, drafts in grants:
        row += n_tokens + len(drafts)
        if not is_finite(row):
            found[request] = request.n_computed + n_tokens
    return found


class StreamRows:
    """The rows of the streams' batch; they are reused from step to step as long as the plan is."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._plan = NOTHING
        self._seqs: list[int] = []

    def fill(self, batch: Batch, plan: StepPlan) -> list[int]:
        """Fill in the rows of a plan. Returns the sequence of each."""
        if plan is self._plan and batch is self._batch and plan.is_reusable and not plan.n_draft_rows:
            # A decoding request has one pending token, its last.
            batch.token[: plan.n_rows] = [grant.request.tokens[-1] for grant in plan.grants]
            batch.pos[: plan.n_rows] = [grant.request.n_computed for grant in plan.grants]
        else:
            self._batch, self._plan = batch, plan
            self._seqs = fill_batch(batch, plan.grants)
        return self._seqs


class QueueUpdate(NamedTuple):
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
        self._queue_sent = QueueUpdate([], None)
        self._has_queue_changed = False
        self._queue_due_s = 0.0
        self._is_prompts_turn = False
        self._was_media = False
        self._rounds = AdapterRounds()
        self._prompts = TurnOrder()
        self._batch_groups: Counter[bytes] = Counter()  # of running requests
        self._batch_group = b""  # of the last step
        self._reusable: dict[bytes, StepPlan] = {}

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
            f"{waiting} for a slot, which is the limit (--max-queue)", retry_after_s=max(waits_s) if waits_s else 1.0
        )

    def too_late(
        self, request: Request, deadline_s: float | None, match: Callable[[PrefixKey], int], *, now_s: float
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

    def queue_update(self, now_s: float) -> QueueUpdate | None:
        """Who waits, and for how long, if that is news."""
        is_due = bool(self.waiting) and now_s >= self._queue_due_s
        if not self._has_queue_changed and not is_due:
            return None
        order = self.policy.order(self.waiting, now_s)
        update = QueueUpdate([request.id for request in order], self._waits_s(order))
        self._has_queue_changed = False
        if update.ids == self._queue_sent.ids and not is_due:
            return None
        self._queue_sent, self._queue_due_s = update, now_s + QUEUE_UPDATE_S
        return update

    def start(self, request: Request, seq: int, n_cached: int, now_s: float) -> None:
        """A waiting request runs from now on in `seq`, which holds its first `n_cached` tokens."""
        self.waiting.remove(request)
        self.running.append(request)
        self._batch_groups[request.batch_group] += 1
        self._reusable = {}
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
        self._reusable = {}

    def end_isolation(self, request: Request) -> None:
        """A running request that was computed alone is computed with others again."""
        with self._changing_group(request):
            request.isolated_until = 0

    def enter_pool(self, request: Request) -> None:
        """A running request has its steps in the pool beside the streams from now on."""
        with self._changing_group(request):
            request.is_long = True

    def leave_pool(self, request: Request) -> None:
        """A running request has its steps among the streams again."""
        with self._changing_group(request):
            request.is_long = False

    @contextmanager
    def _changing_group(self, request: Request) -> Generator[None]:
        self._batch_groups[request.batch_group] -= 1
        yield
        self._batch_groups[request.batch_group] += 1
        self._batch_groups += Counter()  # without those that nobody has
        self._reusable = {}

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

    def victim(self, among: Sequence[Request] = ()) -> Request:
        """The running request to preempt when cells run out, of these or of all."""
        return self.policy.victim(among or self.running)

    def leader(self, request: Request, n_matched: int) -> tuple[Request, int] | None:
        """The running request that is computing a longer prefix of this prompt than the cache has now, and the length
        of that prefix.

        Two prompts never both compute a shared prefix: the second waits until the first has it.
        """
        limit = request.n_tokens - 1
        for other in self.running:
            if not other.is_prefilling or other.n_computed >= limit or other.key.salt != request.key.salt:
                continue
            shared = request.key.floor(common_prefix(other.tokens, request.tokens, 0, limit))
            if shared >= SHARED_PREFIX_TOKENS and n_matched < shared and other.n_computed < shared:
                return other, shared
        return None

    def reusable_plan(self) -> StepPlan | None:
        """The previous plan, if it still holds: all running requests are streams in it and wait for one token each.
        With several sets of adapters, the previous plan of the one whose turn it is. None otherwise."""
        plans = self._reusable
        if not plans:
            return None
        plan = next(iter(plans.values())) if len(plans) == 1 else plans[self._rounds.next(plans)]
        if any(len(request.tokens) - request.n_computed != 1 or request.sits_out for request, _, _ in plan.grants):
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
        seeing: list[Request] = []
        for request in self.running:
            if request.sits_out:
                continue
            if request.chunks and request.next_chunk is not None:
                seeing.append(request)
            else:
                (decoding if request.n_pending == 1 else prefilling).append(request)
        if seeing:
            others = prefilling if left_s is not None else [*prefilling, *decoding]
            plan = self._media_plan(seeing, decoding, n_free, left_s) if not (self._was_media and others) else None
            if plan is not None:
                return plan
        decoding.sort(key=_by_seq)
        prefilling.sort(key=_by_seq)
        if not prefilling:
            return self._streams_plan(decoding, n_free)
        here, prompts = decoding, prefilling
        if len(self._batch_groups) > 1:
            if left_s is None:
                here, prompts = self._of_turn(decoding, prefilling)
            else:
                here, prompts = self._of_turn(decoding)[0], self._of_gap(prefilling, has_streams=bool(decoding))
        streams = [Grant(request, 1) for request in here[:n_free]]
        n_decode = len(streams)
        if not prompts:
            return _plan_of(streams, 0, n_decode)
        is_together = left_s is None and n_decode > 0
        rows = self._prompt_rows(decoding, prompts, left_s)
        demands = [Demand(request.n_grantable, request.client, request.rank) for request in prompts]
        given = share_rows(demands, min(rows, n_free - n_decode))
        if not is_together:
            given = _whole(prompts, given)
            if any(given):
                streams, n_decode = [], 0
        grants = [Grant(request, n_rows) for request, n_rows in zip(prompts, given, strict=True) if n_rows]
        return _plan_of([*streams, *grants], sum(given), n_decode)

    def _streams_plan(self, decoding: list[Request], n_free: int) -> StepPlan:
        """A plan without prompts, which may be steady."""
        groups = _by_group(decoding) if len(self._batch_groups) > 1 else {b"": decoding}
        is_reusable = 0 < len(decoding) == len(self.running) and all(request.n_output for request in decoding)
        plans = {}
        for batch_group, group in groups.items():
            streams = [Grant(request, 1) for request in group[:n_free]]
            plans[batch_group] = _plan_of(
                streams, 0, len(streams), is_reusable=is_reusable and len(streams) == len(group)
            )
        self._reusable = plans if all(plan.is_reusable for plan in plans.values()) else {}
        return plans[self._rounds.next(plans)] if plans else NOTHING

    def _of_turn(
        self, decoding: list[Request], prefilling: Sequence[Request] = ()
    ) -> tuple[list[Request], list[Request]]:
        """Those of the set of adapters whose turn it is."""
        groups = dict.fromkeys(request.batch_group for request in (*decoding, *prefilling))
        if not groups:
            return [], []
        batch_group = self._rounds.next(groups)
        streams, prompts = ([r for r in group if r.batch_group == batch_group] for group in (decoding, prefilling))
        return streams, prompts

    def _of_gap(self, prefilling: list[Request], *, has_streams: bool) -> list[Request]:
        """The prompts that have the time until the streams' next round. They are of one set of adapters, for a change
        takes time, and in the next gap of another."""
        groups = _by_group(prefilling)
        goes_on = has_streams and not self._is_prompts_turn and self._batch_group in groups
        return groups[self._batch_group if goes_on else self._prompts.order(groups)[0]]

    def _media_plan(
        self, seeing: list[Request], decoding: list[Request], n_free: int, left_s: float | None
    ) -> StepPlan | None:
        """A step for the next chunk of one of these requests; None if it is not the time, or there is no room."""
        request = first_of(seeing)
        placed = request.next_chunk
        assert placed is not None
        n_rows, allowed = request.n_grantable, self._prompt_rows(decoding, [request], left_s)
        if placed.chunk.is_causal:
            n_rows = min(n_rows, allowed, n_free)
        elif n_rows > n_free or (decoding and n_rows > allowed and not self._is_prompts_turn):
            n_rows = 0
        if not n_rows:
            return None
        return StepPlan((Grant(request, n_rows),), n_rows, 0, is_media=True, adapters=request.adapters)

    def _prompt_rows(self, decoding: list[Request], prefilling: list[Request], left_s: float | None) -> int:
        """Prompt rows of this step; without `left_s` they join the streams' rows."""
        depth = sum(request.n_computed for request in prefilling) / len(prefilling)
        if left_s is not None and prefilling[0].batch_group != self._batch_group:
            left_s -= self.budget.switch_s
        if left_s is None or not decoding:
            target_s = self._part_s(_target_s(decoding))
            rows = self.budget.prefill_rows(n_decode=len(decoding), depth=depth, target_s=target_s)
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
        streams = [request for request in self.running if is_stream(request)]
        return _target_s(streams) if streams else None

    def due_in_s(self, now_s: float, *, most_s: float = math.inf) -> float:
        """Seconds until streams should have their next step, early enough for their next token. Prompts without streams
        take turns with the background. Infinite if no request takes part in steps; if no stream has a target, they have
        a step every `most_s`.

        Two rounds are always at least one round's duration apart, because a shorter target would starve all others.
        """
        target_s = self.target_s
        if all(request.sits_out for request in self.running):
            return math.inf
        rounds = self._rounds
        if target_s == 0:
            return rounds.ended_at_s + most_s - now_s
        if len(self._batch_groups) > 1 and self._rounds.is_open(self._due_groups):
            return 0.0
        return rounds.ended_at_s + max((target_s or 0.0) - rounds.long_s, rounds.usual_s) - now_s

    @property
    def has_higher_prompt(self) -> bool:
        """Whether a request of a higher lane than the lowest has a prompt to be computed in a step."""
        return any(r.rank < LOWEST_RANK and r.n_output == 0 and not r.sits_out for r in self.running)

    @property
    def step_target_s(self) -> float:
        """How long a step may take so that streams have their tokens in time; 0 if none has a target."""
        return self._part_s(self.target_s or 0.0)

    def _part_s(self, target_s: float) -> float:
        """The part of a target that one set of adapters has for its rows."""
        n_sets = len(self._batch_groups)
        if not target_s or n_sets <= 1:
            return target_s
        return max(_LEAST_TARGET_S, target_s / n_sets - self.budget.switch_s)

    @property
    def _due_groups(self) -> dict[bytes, None]:
        """Sets of adapters that take part in rounds: those of streams, and of prompts where these share their steps."""
        return dict.fromkeys(
            request.batch_group
            for request in self.running
            if is_stream(request) or (self.budget.mixes_rows and not request.sits_out)
        )

    def is_turn_near(self, now_s: float, within_s: float) -> bool:
        """Whether streams with a target have a step so soon that work of `within_s` would make them late."""
        return bool(self.target_s) and self.due_in_s(now_s) < within_s

    def observe(self, plan: StepPlan, *, depth: float, step_s: float, ended_at_s: float) -> None:
        """A planned step took `step_s` seconds; its prompt rows began `depth` tokens deep."""
        n_prefill, n_decode, batch_group = plan.n_prefill_rows, plan.n_decode_rows, plan.batch_group
        switches, self._batch_group = batch_group != self._batch_group, batch_group
        has_drafts = plan.n_draft_rows > 0
        round_s: float | None = None  # while it lasts, and of prompts alone
        if n_decode or self.budget.mixes_rows:
            if len(self._batch_groups) > 1:
                due = self._due_groups
                round_s = self._rounds.note(batch_group, due, step_s, ended_at_s, has_drafts=has_drafts)
            else:
                round_s = self._rounds.note_only(batch_group, step_s, ended_at_s, has_drafts=has_drafts)
        if n_prefill:
            self._prompts.took(batch_group)
        if not has_drafts:  # such a step says little about others, for it gives more tokens and takes longer
            if not plan.is_long:
                self.budget.observe(
                    n_decode=n_decode, n_prefill=n_prefill, depth=depth, step_s=step_s, switches=switches
                )
            if n_prefill:
                self.waits.observe_step(n_decode=0, n_prefill=n_prefill, step_s=step_s)
            if n_decode and round_s is not None:
                self.waits.observe_step(n_decode=n_decode, n_prefill=0, step_s=round_s)
        self._is_prompts_turn, self._was_media = round_s is not None and n_decode > 0, plan.is_media

    def is_short(self, plan: StepPlan) -> bool:
        """Whether `plan` leaves out a stream, or everyone, for lack of cells."""
        here = [request for request in self.running if not request.sits_out]
        n_decoding = sum(is_stream(r) and r.batch_group == plan.batch_group for r in here)
        if plan.n_prefill_rows and not plan.n_decode_rows:
            n_decoding = 0
        return plan.n_decode_rows < n_decoding or (plan.n_rows == 0 and bool(here))

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        self._batch_groups[request.batch_group] -= 1
        self._batch_groups += Counter()  # without those that nobody has
        self._reusable = {}
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None
        request.seq = None
        request.is_long = request.is_held = False

    def _waits_s(self, order: list[Request]) -> list[float] | None:
        return self.waits.first_tokens_s(self.running, order, n_free_slots=len(self._free_slots), known_rows={})


def _plan_of(grants: Sequence[Grant], n_prefill: int, n_decode: int, *, is_reusable: bool = False) -> StepPlan:
    adapters = grants[0].request.adapters if grants else BASE
    return StepPlan(tuple(grants), n_prefill, n_decode, is_reusable, adapters=adapters)


def _by_group(requests: Sequence[Request]) -> dict[bytes, list[Request]]:
    groups: dict[bytes, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.batch_group, []).append(request)
    return groups


def first_of(seeing: Iterable[Request]) -> Request:
    """The request whose media chunk is computed next. A chunk is finished before another request's begins."""
    return min(seeing, key=lambda request: (request.rank, request.arrived_at_s, request.id))


def is_stream(request: Request) -> bool:
    """Whether it takes part in steps with its last token."""
    is_last = request.n_pending == 1 and not request.sits_out
    return is_last and not (request.chunks and request.next_chunk is not None)


def _by_seq(request: Request) -> int:
    assert request.seq is not None
    return request.seq


def _whole(prompts: Sequence[Request], given: list[int]) -> list[int]:
    """Drop parts of short prompts if others finish: a pass for a part costs nearly as much as a whole one."""
    pairs = list(zip(prompts, given, strict=True))
    if not any(n_rows == request.n_grantable for request, n_rows in pairs):
        return given
    return [0 if n_rows < request.n_grantable <= TILE_ROWS else n_rows for request, n_rows in pairs]


def _target_s(decoding: Iterable[Request]) -> float:
    """The inter-token time that a step must keep: the shortest that a stream asks for, or 0."""
    return min((request.target_itl_s for request in decoding if request.target_itl_s), default=0.0)
