"""Drafts for the streams of a step: who has some, which are worth their rows, and what became of them.

A step of streams is planned first (`scheduler.py`). Each stream that may draft has a `DraftState`: what its grammar
forces comes first, then what is found in its conversation (`lookup.py`), both for free. A drafter that computes
(`Drafter`) is asked where these have little, if what it usually gains is worth its time. `choice.py` then decides
how many rows everybody gets, and the plan gets them as `Grant.drafts`. While a prompt is being computed nobody drafts:
its rows come first.

Owner: the engine's main thread. Does not: verify drafts (`answers.py`), or take wrong ones off their cells
(`cache.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from localrun.engine.backend import Backend, MemoryKind
from localrun.engine.request import DraftTotals, Request
from localrun.engine.schedule.scheduler import StepPlan
from localrun.engine.speculate import choice
from localrun.engine.speculate.choice import DepthCosts, DraftChoice, DraftLimits, DraftPolicy, DraftStream
from localrun.engine.speculate.lookup import Lookup
from localrun.wire import DraftSource, Submit


class Drafter(Protocol):
    """What drafts by computing: a smaller model, or heads of the model itself. A draft has at most `n_most` tokens.

    It is a guess of the tokens that follow a request's tokens. The next step computes them as rows of their own, and as
    many are kept as the request's sampler would have chosen anyway, so a drafter can be wrong but never do harm."""

    source: DraftSource
    n_most: int

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """At most so many tokens that are likely to follow each request's `tokens`; an empty list where nothing is
        ready. Never holds streams up for much longer than a step: a long prompt is caught up with over several calls.
        """

    def drop(self, request: Request) -> None:
        """A request ends or leaves its sequence: what is known of it may be forgotten. Unknown ones are none of its
        concern."""

    def close(self) -> None:
        """Free everything."""


class Heads(Drafter, Protocol):
    """Layers of the model itself that draft."""

    def decoded(self, n_rows: int) -> None:
        """The backend has decoded the first rows of its batch, and nothing was sampled from them yet."""


# What a grammar forces, and the model might still write in other tokens.
_FORCED_CHANCE = 0.9
# What a drafter is expected to achieve until it was tried; where it has failed it is tried again after so many steps,
# and each time after twice as many.
_DRAFTER_CHANCE = 0.65
_FIRST_PAUSE_STEPS = 64
_SOON_STEPS = 8
_MOST_PAUSE_STEPS = 8192
_HOPE = 0.999
_LATEST = 0.1  # weight of the latest draft in a chance, and of the latest step in a cost


class Part(NamedTuple):
    """`n_tokens` of a draft in a row, which come from one source."""

    source: DraftSource
    n_tokens: int


@dataclass
class Proposal:
    """The tokens of a draft with their chances, in parts by source. `drafter` would have to compute them first; where
    it does not, `free` is what is known all the same."""

    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    drafter: Drafter | None = None
    free: Proposal | None = None

    def add(self, tokens: list[int], chances: list[float], source: DraftSource) -> None:
        """Append what a source has."""
        if tokens:
            self.tokens += tokens
            self.chances += chances
            self.parts.append(Part(source, len(tokens)))


_NOTHING = Proposal()


class DraftState:
    """One request's drafts, which count in the `total`."""

    def __init__(self, request: Request, prediction: Sequence[int], total: DraftTotals) -> None:
        self.counts = DraftTotals(total)
        self._request = request
        self._prediction = prediction
        self._lookup: Lookup | None = None  # made at the first step: a request that waits needs none
        self._forced: list[int] = []
        self._forced_chance = _FORCED_CHANCE
        self._drafter_chance = _DRAFTER_CHANCE
        self._pause_steps, self._n_until_try = _FIRST_PAUSE_STEPS, 0

    def expected_accepted(self) -> float:
        """How many drafted tokens may be right, at most, by what is known without computing; a lower bound is
        enough to see that nothing is worth a row."""
        request = self._request
        if self._lookup is None:
            self._lookup = Lookup(request.tokens, request.n_prompt, self._prediction, has_media=bool(request.chunks))
        expected_accepted = self._lookup.follow()
        if request.constraint is None:
            return expected_accepted
        self._forced = request.constraint.forced(choice.MOST_DRAFTS)
        return len(self._forced) + expected_accepted

    def proposal(self, n_most: int) -> Proposal:
        """The best that is known of the next tokens without computing anything, right after `expected_accepted`."""
        assert self._lookup is not None
        proposal, forced = Proposal(), self._forced[: max(0, n_most)]
        proposal.add(forced, [self._forced_chance] * len(forced), DraftSource.GRAMMAR)
        proposal.add(*self._lookup.guess(n_most - len(forced), forced))
        return proposal

    @property
    def asks_soon(self) -> bool:
        """Whether a drafter may be asked within the next few steps."""
        return self._n_until_try <= _SOON_STEPS

    def ask(self, drafter: Drafter, proposal: Proposal, n_most: int) -> Proposal:
        """The guess, or one that the drafter would make, if more is to be expected of that."""
        n_most = min(n_most, drafter.n_most)
        chance = self._drafter_chance
        if self._n_until_try > 0:
            self._n_until_try -= 1
            return proposal
        if n_most <= 0 or sum(choice.expected_gains(proposal.chances)) >= chance / (1 - min(chance, 0.99)):
            return proposal
        return Proposal([], [chance] * n_most, [], drafter, proposal)

    def declined(self) -> None:
        """A drafter's guess was not worth its cost."""
        if self._drafter_chance < _DRAFTER_CHANCE:
            # One try more, later: the text may have become an easier one.
            self._n_until_try = self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, _MOST_PAUSE_STEPS)
            self._drafter_chance = _DRAFTER_CHANCE

    def stepped(self, parts: Sequence[Part], n_right: int, n_tokens: int, ratio: float) -> None:
        """A step that took `ratio` times as long as without drafts gave `n_tokens`; `n_right` drafted ones were
        right."""
        self.counts.n_saved += n_tokens - ratio
        for source, n_drafted in parts:
            n_accepted = max(0, min(n_drafted, n_right))
            n_right -= n_drafted
            self.counts.add(source, n_drafted=n_drafted, n_accepted=n_accepted)
            n_judged = min(n_drafted, n_accepted + 1)  # nobody knows about those behind the first wrong one
            share = n_accepted / n_judged
            if source is DraftSource.GRAMMAR:
                self._forced_chance += _LATEST * (share - self._forced_chance)
            elif source in (DraftSource.MTP, DraftSource.DRAFT_MODEL):
                self._drafter_chance += _LATEST * n_judged * (share - self._drafter_chance) / (1 + _LATEST * n_judged)
                if n_accepted:
                    self._pause_steps = _FIRST_PAUSE_STEPS


class Speculation:
    """See the module. `is_on` is for requests that do not say whether they draft. `drafter_of` names what computes
    drafts for a request, if anything does, else the model's own `heads` may; `policy` decides what is worth its
    rows."""

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float],
        *,
        is_on: bool = True,
        drafter_of: Callable[[Request], Drafter | None] | None = None,
        heads: Callable[[], Heads | None] | None = None,
        policy: DraftPolicy = choice.BY_COST,
    ) -> None:
        self.costs = DepthCosts()
        self._costs = self.costs.at(0)  # of the latest step that was asked about
        self.counts = DraftTotals()
        self._backend = backend
        self._clock = clock
        self._is_on = is_on
        self._drafter_of = drafter_of
        self._heads = heads
        self._states: dict[Request, DraftState] = {}
        self._policy = policy
        self._draft_s = 0.0
        self._drawn_s = 0.0  # what drafters took since the last step
        self._ended_at_s, self._batch_group = 0.0, b""  # of the last step; its end only if that was steady
        # Of the step at hand.
        self._parts: dict[int, list[Part]] = {}
        self._ratio = 1.0
        self._before: dict[int, tuple[int, int]] = {}

    def begin(self, request: Request, submit: Submit, prediction: Sequence[int]) -> None:
        """A new request."""
        wants = self._is_on if submit.speculates is None else submit.speculates
        if wants and self._backend.n_rollback:
            # No answer is longer than the context, and what is behind that much of a prediction costs steps to index.
            state = DraftState(request, prediction[: self._backend.n_ctx], self.counts)
            self._states[request], request.drafts = state, state.counts

    def extend(
        self, plan: StepPlan, n_free: int, n_beside: int, target_s: Callable[[], float], attend_s: Callable[[], float]
    ) -> StepPlan:
        """A plan of streams alone with the drafts that are worth their rows, if any: as far as there are free cells, of
        each stream or in the pool, and within the streams' latency target, in seconds, 0 for none. `n_beside` streams
        wait for their own step. Attending over one more token takes a row `attend_s`."""
        n_streams = len(plan.grants)
        expected_accepted, may_draw, n_tokens = 0.0, False, 0
        for request, _, _ in plan.grants:
            n_tokens += len(request.tokens)
            if request.drafts is not None:
                expected_accepted += self._states[request].expected_accepted()
                may_draw = may_draw or self._drafter(request) is not None
        is_split, is_even = self._is_split(plan), self._is_even(plan)
        n_attended = n_tokens // n_streams if is_even else n_tokens
        costs = self._costs = self.costs.at(n_attended, is_even=is_even and n_streams > 1, attend_s=attend_s)
        may_pay = may_draw or self._policy.may_pay(
            n_streams, expected_accepted, costs, is_even=is_even, n_beside=n_beside
        )
        if not may_pay:
            return plan
        self._parts, self._ratio = {}, 1.0
        backend = self._backend
        most_rows = min(backend.n_draft_rows, backend.batch.capacity - n_streams)
        most_each = min(choice.MOST_DRAFTS, backend.n_rollback)
        if is_split:
            most_each = min(most_each, n_free - 1)
        else:
            most_rows = min(most_rows, n_free - n_streams)
        most_each = min(most_each, most_rows, *(backend.n_ctx - grant.request.n_tokens for grant in plan.grants))
        if most_each <= 0:
            return plan
        guesses = [self._guess(grant.request, most_each) for grant in plan.grants]
        streams = [
            DraftStream(grant.request.seq or 0, proposal.chances, proposal.drafter is not None)
            for grant, proposal in zip(plan.grants, guesses, strict=True)
        ]
        limits = DraftLimits(
            most_each, most_rows, target_s(), is_even, self._draft_s, may_be_uneven=is_split, n_beside=n_beside
        )
        chosen = self._policy.choose(streams, costs, limits)
        if any(stream.is_drawn for stream in streams):
            guesses = self._drawn(plan, guesses, chosen)
            streams = [
                DraftStream(stream.seq, proposal.chances) for stream, proposal in zip(streams, guesses, strict=True)
            ]
            chosen = self._policy.choose(streams, costs, limits)
        return plan if chosen is None else self._with_drafts(plan, guesses, chosen)

    def computed(self, plan: StepPlan, ended_at_s: float) -> None:
        """A step was computed. What counts is how long after the one before it: that is what a token takes. What its
        drafts took is no time of its rows, and a change of adapters takes time that no row does."""
        drawn_s, self._drawn_s = self._drawn_s, 0.0
        began_at_s, self._ended_at_s = self._ended_at_s, ended_at_s if plan.is_reusable else 0.0
        is_same, self._batch_group = plan.batch_group == self._batch_group, plan.batch_group
        if not (plan.is_reusable and began_at_s and is_same):
            return
        if choice.is_one_pass([len(grant.drafts) for grant in plan.grants], is_even=self._is_even(plan)):
            self._costs.observe(plan.n_rows, ended_at_s - began_at_s - drawn_s, ended_at_s)

    def broken_off(self) -> None:
        """A step was not computed after all: the time since the one before it says nothing about the next one."""
        self._ended_at_s = self._drawn_s = 0.0

    def begin_step(self, requests: Iterable[Request]) -> None:
        """A step with drafts was computed, and nothing was drawn yet."""
        self._before = {request.id: (request.n_computed, request.n_tokens) for request in requests}

    def end_step(self, request: Request) -> int:
        """The request has got what that step gives it. Returns how many tokens these are."""
        n_computed, n_tokens = self._before[request.id]
        n_right, n_given = request.n_computed - n_computed, request.n_tokens - n_tokens
        if request.drafts is not None:
            parts = self._parts.get(request.id, [])
            self._states[request].stepped(parts, n_right, n_given, self._ratio)
        return n_given

    def decoded(self, plan: StepPlan) -> None:
        """The backend has decoded this plan. The model's heads compute its rows, too, unless nobody is going to ask
        them for drafts soon."""
        heads = self._heads() if self._heads is not None else None
        if heads is None or plan.is_media or plan.is_long:
            return
        if any(self._states[r].asks_soon for r, _, _ in plan.grants if r.drafts is not None):
            heads.decoded(plan.n_rows)

    def drop(self, request: Request) -> None:
        """A request leaves its sequence."""
        drafter = self._drafter(request) if request in self._states else None
        if drafter is not None:
            drafter.drop(request)

    def end(self, request: Request) -> None:
        self.drop(request)
        self._states.pop(request, None)

    def has_drafter(self, request: Request) -> bool:
        """Whether something that follows a request's sequence computes drafts for it."""
        return request in self._states and self._drafter(request) is not None

    def _is_split(self, plan: StepPlan) -> bool:
        return self._backend.is_split and not plan.is_long

    def _is_even(self, plan: StepPlan) -> bool:
        """Whether the library computes only equal numbers of rows of each sequence together."""
        return self._is_split(plan) or self._backend.memory_kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)

    def _drafter(self, request: Request) -> Drafter | None:
        """What computes drafts for a request; nothing that has not seen its media, or has no room for it."""
        if request.chunks or request.is_long:
            return None
        named = self._drafter_of(request) if self._drafter_of is not None else None
        return named or (self._heads() if self._heads is not None else None)

    def _guess(self, request: Request, most_each: int) -> Proposal:
        if request.drafts is None:
            return _NOTHING
        state = self._states[request]
        # The last token of an answer is never a draft: the row before it has it.
        n_most = min(most_each, request.n_left - 1)
        proposal = state.proposal(n_most)
        drafter = self._drafter(request)
        return proposal if drafter is None else state.ask(drafter, proposal, n_most)

    def _drawn(self, plan: StepPlan, guesses: list[Proposal], chosen: DraftChoice | None) -> list[Proposal]:
        """The guesses, with those of drafters made as long as they were chosen. What a drafter takes too long for, or
        has nothing of, is what is known for free."""
        drawn = [proposal.free or proposal for proposal in guesses]
        wanted: dict[Drafter, list[tuple[int, int]]] = {}
        for index, proposal in enumerate(guesses):
            if proposal.drafter is None:
                continue
            n_wanted = 0 if chosen is None else min(chosen.n_rows[index], len(proposal.chances))
            if n_wanted:
                wanted.setdefault(proposal.drafter, []).append((index, n_wanted))
            else:
                self._states[plan.grants[index].request].declined()
                self._draft_s *= _HOPE  # what is too dear is tried again in a while
        for drafter, asked in wanted.items():
            began_s = self._clock()
            tokens = drafter.propose([(plan.grants[index].request, n_wanted) for index, n_wanted in asked])
            seconds = self._clock() - began_s
            self._drawn_s += seconds
            n_longest = max(map(len, tokens))
            if n_longest:  # otherwise it was catching up with prompts
                position_s = seconds / n_longest
                self._draft_s += _LATEST * (position_s - self._draft_s) if self._draft_s else position_s
            for (index, _), own in zip(asked, tokens, strict=True):
                if own:
                    drawn[index] = proposal = Proposal()
                    proposal.add(own, guesses[index].chances[: len(own)], drafter.source)
                self._states[plan.grants[index].request].counts.add(drafter.source, seconds=seconds / len(asked))
        return drawn

    def _with_drafts(self, plan: StepPlan, guesses: Sequence[Proposal], chosen: DraftChoice) -> StepPlan:
        grants = []
        for grant, proposal, n_rows in zip(plan.grants, guesses, chosen.n_rows, strict=True):
            tokens = proposal.tokens[:n_rows]
            filled = tokens + [grant.request.tokens[-1]] * (n_rows - len(tokens))
            grants.append(grant._replace(drafts=tuple(filled)))
            if tokens:
                self._parts[grant.request.id] = _cut(proposal.parts, len(tokens))
        n_rows = sum(chosen.n_rows)
        is_one_pass = choice.is_one_pass(chosen.n_rows, is_even=self._is_even(plan))
        n_streams = len(grants)
        self._ratio = self._costs.measured(n_streams + n_rows, n_streams) if is_one_pass else chosen.ratio
        self._ratio += self._drawn_s / (self._costs.seconds(n_streams) or math.inf)
        return replace(plan, grants=tuple(grants), n_draft_rows=n_rows)


def _cut(parts: Sequence[Part], n_tokens: int) -> list[Part]:
    """The parts of a draft's first tokens."""
    kept = []
    for part in parts:
        n_kept = min(part.n_tokens, n_tokens)
        if n_kept:
            kept.append(Part(part.source, n_kept))
        n_tokens -= n_kept
    return kept
