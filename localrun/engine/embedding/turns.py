"""Whose input goes into a step next: lanes, fairness between clients, aging. Pure; time is an argument.

The rules are those of `policy.py`, at a finer grain: requests hold no slots, so each input is a decision of its own. A
request of the best rank goes first; among these the client with the least counted service (rows computed); among its
requests the one that has had least, so that one text beside a thousand of the same client does not wait for them. A
request that got nothing for `AGING_S` is lifted by a rank, and before all after `STARVED_S`.

Does not: know rows, sequences or tokens; `engine.py` asks again and again until a step is full.
"""

from __future__ import annotations

from collections.abc import Collection

from localrun.engine.embedding.ticket import Ticket
from localrun.engine.policy import AGING_S, LANE_RANKS, STARVED_S, Policy
from localrun.errors import QueueFull
from localrun.wire import Embed

# What one step leaves of the weight of those before it.
_RATE_DECAY = 0.9


class Turns:
    """See the module. At most `max_tickets` requests are there at once."""

    def __init__(self, *, max_tickets: int) -> None:
        self.tickets: dict[int, Ticket] = {}
        self._max_tickets = max_tickets
        self._policy = Policy()
        self._rows = self._seconds = 0.0

    def check(self, embed: Embed) -> None:
        """Raises QueueFull when there are too many requests, or when this one cannot begin within its deadline."""
        wait_s = self._wait_s()
        if len(self.tickets) >= self._max_tickets:
            raise QueueFull(
                f"{len(self.tickets)} embedding requests of this model wait, which is the limit (--max-queue)",
                retry_after_s=wait_s / len(self.tickets) if wait_s else 1.0,
            )
        own_s = Ticket(embed).about_tokens() * self._seconds / self._rows if self._rows else 0.0
        if embed.deadline_s is not None and wait_s + own_s > embed.deadline_s:
            raise QueueFull(
                f"the answer is expected in {wait_s + own_s:.1f} s ({own_s:.1f} s of them for the request itself), "
                f"later than the deadline of {max(0.0, embed.deadline_s):.1f} s from now; ask later or send less",
                retry_after_s=max(0.1, min(wait_s, wait_s + own_s - embed.deadline_s)),
            )

    def enter(self, ticket: Ticket) -> None:
        self.tickets[ticket.id] = ticket
        self._policy.enter(ticket.embed.client)

    def leave(self, ticket: Ticket) -> None:
        del self.tickets[ticket.id]
        self._policy.leave(ticket.embed.client)

    def next_up(self, now_s: float, passed_over: Collection[Ticket]) -> Ticket | None:
        """The request whose input is next; None when nobody is left who has one."""
        candidates = [
            ticket
            for ticket in self.tickets.values()
            if ticket not in passed_over and (ticket.current is not None or ticket.has_more)
        ]
        return min(candidates, key=lambda ticket: self._key(ticket, now_s), default=None)

    def charge(self, ticket: Ticket, n_rows: int, now_s: float) -> None:
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
        return sum(ticket.about_left() for ticket in self.tickets.values()) * self._seconds / self._rows

    def _key(self, ticket: Ticket, now_s: float) -> tuple[int, int, int, float, int]:
        embed = ticket.embed
        age_s = max(0.0, now_s - (embed.arrived_at_s if ticket.served_at_s is None else ticket.served_at_s))
        rank = -1 if age_s >= STARVED_S else max(0, LANE_RANKS[embed.lane] - int(age_s / AGING_S))
        return rank, self._policy.service(embed.client), ticket.n_computed, embed.arrived_at_s, ticket.id
