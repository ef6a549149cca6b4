"""Who is next: lanes, fairness between clients, aging, and who gives a slot up. Pure; time is an argument.

A request has a *rank*: its lane's, lifted by one per `AGING_S` without service, and before all after `STARVED_S`. Of
one rank the client with the least counted service goes first (the Virtual Token Counter of Sheng et al., OSDI 2024):
the uncached prompt tokens when a request starts, and `OUTPUT_WEIGHT` for each output token. A client that becomes
active is lifted to the least service of the active ones, so that idling saves up no credit.

Without service means: since it waits and since its client last started a request in this lane. A client's own backlog
is no reason to go before others, or whoever sends most would soon have the oldest requests.

A waiting request takes the slot of a running one if its lane is above the rank that the running one started with. Each
preemption counts as `PREEMPTION_AGE_S` of waiting, so a request of the lowest lane is preempted at most
2 * AGING_S / PREEMPTION_AGE_S times before no lane is above it.

Does not: know slots, cells or budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from localrun.engine.request import Request
from localrun.wire import Lane

AGING_S = 20.0
STARVED_S = 60.0
PREEMPTION_AGE_S = 5.0
OUTPUT_WEIGHT = 2
LANE_RANKS = {Lane.INTERACTIVE: 0, Lane.DEFAULT: 1, Lane.BATCH: 2}
_STARVED_RANK = -1


class Policy:
    """Counts service per client and orders requests by it."""

    def __init__(self) -> None:
        self._service: dict[str, int] = {}
        self._active: Counter[str] = Counter()
        self._last_start_s: dict[tuple[str, Lane], float] = {}

    def enter(self, client: str) -> None:
        """A request of this client arrived."""
        if not self._active[client]:
            floor = min((self._service[other] for other in self._active if self._active[other]), default=0)
            lifted = max(self._service.get(client, 0), floor)
            # An account at or below the floor would be lifted to it anyway: nothing is lost with it.
            self._service = {
                one: served for one, served in self._service.items() if self._active[one] or served > floor
            }
            self._service[client] = lifted
        self._active[client] += 1

    def leave(self, client: str) -> None:
        """A request of this client ended. The last client to leave takes all accounts with it."""
        self._active[client] -= 1
        if not self._active[client]:
            del self._active[client]
            for lane in Lane:
                self._last_start_s.pop((client, lane), None)
        if not self._active:
            self._service.clear()

    def start(self, request: Request, now_s: float) -> None:
        """A waiting request gets a slot, and keeps the rank that it has now."""
        request.rank = self.rank(request, now_s)
        request.waited_s = self._waited_s(request, now_s)
        self._last_start_s[request.client, request.lane] = now_s

    def preempt(self, request: Request, now_s: float) -> None:
        """A running request gave its slot up, and waits at the head of its lane."""
        request.n_preempted += 1
        request.requeued_at_s = now_s

    def charge(self, client: str, *, n_prefill: int = 0, n_output: int = 0) -> None:
        """So much service was promised (`n_prefill`) or given (`n_output`) to this client. Negative takes it back."""
        self._service[client] += n_prefill + OUTPUT_WEIGHT * n_output

    def service(self, client: str) -> int:
        """Counted service of an active client."""
        return self._service.get(client, 0)

    def rank(self, request: Request, now_s: float) -> int:
        """Of a waiting request: 0 is the highest lane's, more is lower, -1 is before all."""
        age_s = self._waited_s(request, now_s) + PREEMPTION_AGE_S * request.n_preempted
        if age_s >= STARVED_S:
            return _STARVED_RANK
        return max(0, LANE_RANKS[request.lane] - int(age_s / AGING_S))

    def order(self, waiting: Iterable[Request], now_s: float) -> list[Request]:
        """Waiting requests, next first."""
        by_rank: dict[int, list[Request]] = {}
        for request in waiting:
            by_rank.setdefault(self.rank(request, now_s), []).append(request)
        return [request for rank in sorted(by_rank) for request in self._in_turn(by_rank[rank])]

    def victim(self, running: Iterable[Request]) -> Request:
        """The running request to take off when cells run out: of the lowest rank, the youngest."""
        return max(running, key=_last_to_keep)

    def outranked(self, running: Iterable[Request], lane: Lane) -> list[Request]:
        """The running requests that a waiting one of this lane may take off, the first to go last."""
        return sorted((request for request in running if request.rank > LANE_RANKS[lane]), key=_last_to_keep)

    def _in_turn(self, waiting: Sequence[Request]) -> list[Request]:
        """Requests of one rank. Each turn goes to the client with the least service, where those before it count as
        served: else the first to be least served would take all slots that are free."""
        by_age = sorted(waiting, key=lambda request: (request.arrived_at_s, request.id))
        preempted = [request for request in by_age if request.n_preempted]
        queues: dict[str, list[Request]] = {}
        for request in by_age:
            if not request.n_preempted:
                queues.setdefault(request.client, []).append(request)
        if len(queues) == 1:
            return preempted + next(iter(queues.values()))
        turns = [
            (self._service[client], queue[0].arrived_at_s, queue[0].id, client, 0) for client, queue in queues.items()
        ]
        heapify(turns)
        in_turn = preempted
        while turns:
            service, _, _, client, at = turns[0]
            queue = queues[client]
            in_turn.append(queue[at])
            if at + 1 < len(queue):
                following = queue[at + 1]
                service += queue[at].n_tokens
                heapreplace(turns, (service, following.arrived_at_s, following.id, client, at + 1))
            else:
                heappop(turns)
        return in_turn

    def _waited_s(self, request: Request, now_s: float) -> float:
        last_start_s = self._last_start_s.get((request.client, request.lane), request.arrived_at_s)
        since_s = max(request.arrived_at_s, request.requeued_at_s, last_start_s)
        return request.waited_s + max(0.0, now_s - since_s)


def _last_to_keep(request: Request) -> tuple[int, float, int]:
    return request.rank, request.arrived_at_s, request.id
