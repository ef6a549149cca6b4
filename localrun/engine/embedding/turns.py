"""Whose input goes into a step next: lanes, fairness between clients, aging. Pure; time is an argument.

The rules are those of `policy.py`, at a finer grain: requests hold no slots, so each input is a decision of its own. A
request of the best rank goes first; among these the client with the least counted service (rows computed); among its
requests the one that has had least, so that one text beside a thousand of the same client does not wait for them. A
request that got nothing for `AGING_S` is lifted by a rank, and before all after `STARVED_S`.

Does not: know rows, sequences or tokens; `engine.py` asks a `StepOrder` again and again until a step is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from localrun.engine.embedding.inputs import FloatVector, InputTokens
from localrun.engine.sample.text import MediaSpan
from localrun.engine.schedule.policy import AGING_S, LANE_RANKS, STARVED_S, Policy
from localrun.errors import QueueFull
from localrun.wire import Embed, Mixed, Pooling, Usage

# For predictions and for what people see before the tokens are counted: English text has about four.
_CHARACTERS_PER_TOKEN = 4
# And a picture has some hundred, for most models.
_TOKENS_PER_MEDIA = 256


@dataclass
class InputProgress:
    """The input at hand: `n_computed` of its tokens are done; `vector` is what they were pooled to so far. Those of
    `chunks` are rows of media."""

    index: int
    tokens: list[int]
    n_cut: int
    chunks: tuple[MediaSpan, ...] = ()
    n_computed: int = 0
    vector: FloatVector | None = None

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def chunks_left(self) -> list[MediaSpan]:
        """The chunk that is at hand, and those that come next."""
        return [span for span in self.chunks if span.end > self.n_computed]

    @property
    def next_chunk(self) -> MediaSpan | None:
        """The chunk that is at hand, or comes next."""
        return next(iter(self.chunks_left), None)

    @property
    def n_next(self) -> int:
        """Rows that one call can compute: as far as the tokens are of the vocabulary, or of one chunk."""
        span = self.next_chunk
        if span is None:
            return self.n_left
        return (span.start if self.n_computed < span.start else span.end) - self.n_computed

    def take(self, vector: FloatVector, n_rows: int, pooling: Pooling) -> None:
        """What the next `n_rows` tokens were pooled to. A mean of parts is weighed by their lengths; else the first
        part counts, or the last one."""
        if self.vector is None or pooling in (Pooling.LAST, Pooling.RANK):
            self.vector = vector
        elif pooling is Pooling.MEAN:
            share = np.float32(n_rows / (self.n_computed + n_rows))
            self.vector = self.vector + (vector - self.vector) * share
        self.n_computed += n_rows


@dataclass(eq=False)
class EmbeddingRequest:
    """One embedding request inside the engine: its inputs, how far they are, and what they became.

    Inputs are tokenized one by one, when their turn comes: a request of a thousand texts holds nobody up before it has
    begun, and one that is cancelled has cost nothing more.

    Invariant: `current` is set exactly while an input is partly computed or about to be; `seq` while it is partly
    computed.

    Times are seconds of the monotonic clock.
    """

    embed: Embed
    n_begun: int = 0
    n_computed: int = 0
    n_media: int = 0
    current: InputProgress | None = None
    seq: int | None = None
    n_done: int = 0
    served_at_s: float | None = None
    started_at_s: float | None = None

    @property
    def id(self) -> int:
        return self.embed.id

    @property
    def has_more(self) -> bool:
        """Whether there is an input that was not begun."""
        return self.n_begun < len(self.embed.inputs)

    @property
    def is_done(self) -> bool:
        return self.n_done == len(self.embed.inputs)

    def next_input(self, tokens_of: Callable[[Embed, int], InputTokens]) -> InputProgress:
        """The input to go on with; tokenizes one if none is at hand. Raises what `tokens_of` raises."""
        if self.current is None:
            self.current = InputProgress(self.n_begun, *tokens_of(self.embed, self.n_begun))
            self.n_begun += 1
        return self.current

    @cached_property
    def about_tokens(self) -> int:
        """About how many tokens it has in all."""
        n_query = len(self.embed.query or "")
        return sum(1 + _about_tokens(one, n_query) for one in self.embed.inputs)

    def usage(self, now_s: float) -> Usage:
        """Counts and times so far."""
        started = self.started_at_s if self.started_at_s is not None else now_s
        return Usage(
            n_prompt=self.n_computed,
            n_cached=0,
            n_output=0,
            queued_s=max(0.0, started - self.embed.arrived_at_s),
            prefill_s=max(0.0, now_s - started),
            decode_s=0.0,
            n_media=self.n_media,
        )


def _about_tokens(one: str | tuple[int, ...] | Mixed, n_query: int) -> int:
    if isinstance(one, Mixed):
        n_characters = sum(len(segment.text) for segment in one.segments)
        n_media = sum(segment.media is not None for segment in one.segments)
        n_ids = sum(len(segment.tokens) for segment in one.segments)
        return n_characters // _CHARACTERS_PER_TOKEN + n_media * _TOKENS_PER_MEDIA + n_ids
    return len(one) if isinstance(one, tuple) else (n_query + len(one)) // _CHARACTERS_PER_TOKEN


# What one step leaves of the weight of those before it.
_RATE_DECAY = 0.9


class EmbeddingQueue:
    """See the module. At most `max_tickets` requests are there at once."""

    def __init__(self, *, max_tickets: int) -> None:
        self.tickets: dict[int, EmbeddingRequest] = {}
        self._max_tickets = max_tickets
        self._policy = Policy()
        self._rows = self._seconds = 0.0

    def check(self, ticket: EmbeddingRequest) -> None:
        """Raises QueueFull when there are too many requests, or when this one cannot begin within its deadline."""
        wait_s, embed = self._wait_s(), ticket.embed
        if len(self.tickets) >= self._max_tickets:
            raise QueueFull(
                f"{len(self.tickets)} embedding requests of this model wait, which is the limit (--max-queue)",
                retry_after_s=wait_s / len(self.tickets) if wait_s else 1.0,
            )
        own_s = ticket.about_tokens * self._seconds / self._rows if self._rows else 0.0
        if embed.deadline_s is not None and wait_s + own_s > embed.deadline_s:
            raise QueueFull(
                f"the answer is expected in {wait_s + own_s:.1f} s ({own_s:.1f} s of them for the request itself), "
                f"later than the deadline of {max(0.0, embed.deadline_s):.1f} s from now; ask later or send less",
                retry_after_s=max(0.1, min(wait_s, wait_s + own_s - embed.deadline_s)),
            )

    def enter(self, ticket: EmbeddingRequest) -> None:
        self.tickets[ticket.id] = ticket
        self._policy.enter(ticket.embed.client)

    def leave(self, ticket: EmbeddingRequest) -> None:
        del self.tickets[ticket.id]
        self._policy.leave(ticket.embed.client)

    def round(self, now_s: float) -> StepOrder:
        return StepOrder(self, now_s)

    def charge(self, ticket: EmbeddingRequest, n_rows: int, now_s: float) -> None:
        """It gets so many rows of the step at hand."""
        ticket.served_at_s = now_s
        self._policy.charge(ticket.embed.client, n_prefill=n_rows)

    def observe(self, n_rows: int, seconds: float) -> None:
        """A step of so many rows took that long."""
        self._rows = self._rows * _RATE_DECAY + n_rows
        self._seconds = self._seconds * _RATE_DECAY + seconds

    def _wait_s(self) -> float:
        """Until everything that is there now is computed; 0 while nothing is known."""
        if not self._rows:
            return 0.0
        # About what is left, by the share of a request's inputs that is done.
        inputs = ((ticket, len(ticket.embed.inputs)) for ticket in self.tickets.values())
        n_left = sum(ticket.about_tokens * (n - ticket.n_done) // n for ticket, n in inputs)
        return n_left * self._seconds / self._rows

    def rank(self, ticket: EmbeddingRequest, now_s: float) -> int:
        """0 is the highest lane's, more is lower, -1 is before all."""
        embed = ticket.embed
        age_s = max(0.0, now_s - (embed.arrived_at_s if ticket.served_at_s is None else ticket.served_at_s))
        return -1 if age_s >= STARVED_S else max(0, LANE_RANKS[embed.lane] - int(age_s / AGING_S))

    def place(self, ticket: EmbeddingRequest, now_s: float) -> tuple[int, int, int, float, int]:
        """Less is sooner."""
        return self.rank(ticket, now_s), self.service(ticket.embed.client), *_in_queue(ticket)[:3]

    def service(self, client: str) -> int:
        """Rows that were computed for a client."""
        return self._policy.service(client)


# Rank, service of the client, tokens computed, time of arrival, id; the least is next. And the client.
_Head = tuple[int, int, int, float, int, str]


class StepOrder:
    """The tickets of a step in order, taken one by one. Service that is charged in the meantime counts at once.

    A heap for each rank and client, and one of their heads: a look at all tickets for a step and not for each input.
    Invariant: every queue's newest head is not above its true one, for a client's service only grows.
    """

    def __init__(self, turns: EmbeddingQueue, now_s: float) -> None:
        self._turns = turns
        self._now_s = now_s
        self._queues: dict[tuple[int, str], list[tuple[int, float, int, EmbeddingRequest]]] = {}
        self._heads: list[_Head] = []
        self._newest: dict[tuple[int, str], _Head] = {}
        for ticket in turns.tickets.values():
            if ticket.current is not None or ticket.has_more:
                self._queues.setdefault(self._key(ticket), []).append(_in_queue(ticket))
        for key, queue in self._queues.items():
            heapify(queue)
            self._push_head(*key)

    def next_up(self) -> EmbeddingRequest | None:
        """The request whose input is next, which leaves the round with that; None when nobody is left."""
        while self._heads:
            entry = heappop(self._heads)
            rank, client = key = entry[0], entry[-1]
            if entry is not self._newest[key]:
                continue
            is_true = entry == self._head(rank, client)
            ticket = heappop(self._queues[key])[-1] if is_true else None
            self._push_head(rank, client)
            if ticket is not None:
                return ticket
        return None

    def put_back(self, ticket: EmbeddingRequest) -> None:
        """It has another input."""
        key = self._key(ticket)
        heappush(self._queues.setdefault(key, []), _in_queue(ticket))
        self._push_head(*key)

    def _key(self, ticket: EmbeddingRequest) -> tuple[int, str]:
        return self._turns.rank(ticket, self._now_s), ticket.embed.client

    def _push_head(self, rank: int, client: str) -> None:
        if self._queues[rank, client]:
            head = self._newest[rank, client] = self._head(rank, client)
            heappush(self._heads, head)

    def _head(self, rank: int, client: str) -> _Head:
        n_computed, arrived_at_s, ticket_id, _ = self._queues[rank, client][0]
        return rank, self._turns.service(client), n_computed, arrived_at_s, ticket_id, client


def _in_queue(ticket: EmbeddingRequest) -> tuple[int, float, int, EmbeddingRequest]:
    return ticket.n_computed, ticket.embed.arrived_at_s, ticket.id, ticket
