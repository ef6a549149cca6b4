"""Who is next: lanes, fairness between clients, aging, who gives up a slot; and whose turn it is among sets of
adapters. Pure; time is an argument.

A request's *rank* is its lane's, raised by one per `AGING_S` without service; after `STARVED_S` it goes before all
others. Within a rank, the client with the least counted service goes first (the Virtual Token Counter of Sheng et al.,
OSDI 2024). Service is the uncached prompt tokens when a request starts, and `OUTPUT_WEIGHT` for each output token. A
client that becomes active is raised to the least service of the active ones, so idling earns no credit.

Time without service counts from when the request began to wait, or from when its client last started a request in this
lane, whichever is later. A client's own backlog is no reason to go before others; otherwise the client that sends most
would soon have the oldest requests.

A waiting request takes the slot of a running one if its lane is above the rank that the running one started with. Each
preemption counts as `PREEMPTION_AGE_S` of waiting, so a request of the lowest lane is preempted at most 2 * AGING_S /
PREEMPTION_AGE_S times before no lane is above it.

Does not: know slots, cells or budgets.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from localrun.engine.request import Request
from localrun.wire import Lane

AGING_S = 20.0
STARVED_S = 60.0
PREEMPTION_AGE_S = 5.0
OUTPUT_WEIGHT = 2
LANE_RANKS = {Lane.INTERACTIVE: 0, Lane.DEFAULT: 1, Lane.BATCH: 2}
LOWEST_RANK = max(LANE_RANKS.values())
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
            # An account at or below the floor would be raised to it anyway, so it can be dropped.
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
        """A running request gave up its slot, and waits at the head of its lane."""
        request.n_preempted += 1
        request.requeued_at_s = now_s

    def charge(self, client: str, *, n_prefill: int = 0, n_output: int = 0) -> None:
        """This client was promised (`n_prefill`) or given (`n_output`) service, in tokens. Negative numbers take it
        back."""
        self._service[client] += n_prefill + OUTPUT_WEIGHT * n_output

    def service(self, client: str) -> int:
        """Counted service of an active client."""
        return self._service.get(client, 0)

    def rank(self, request: Request, now_s: float) -> int:
        """A waiting request's rank: 0 is the highest lane's, higher numbers are lower ranks, -1 goes before all."""
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
        """The running request to take off when cells run out: the youngest of the lowest rank."""
        return max(running, key=_last_to_keep)

    def outranked(self, running: Iterable[Request], lane: Lane) -> list[Request]:
        """The running requests that a waiting one of this lane may take off, the first to go last."""
        return sorted((request for request in running if request.rank > LANE_RANKS[lane]), key=_last_to_keep)

    def _in_turn(self, waiting: Sequence[Request]) -> list[Request]:
        """Requests of one rank, in order. Each turn goes to the client with the least service, counting earlier turns
        as served. Otherwise the least served client would take all free slots."""
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


GRANULE_ROWS = 16
# By rank from 0 on: each lower lane has half the weight. Starved requests have the highest lane's weight.
_WEIGHTS = (4, 2, 1)
# One in so many of a client's rows is shared by all its prompts equally.
_PART_FOR_ALL = 4
# A prompt that wants more than this never finishes in a step or two, and must not wait for all that want less.
_LONG_ROWS = 4 * GRANULE_ROWS


class Demand(NamedTuple):
    """Rows that a prompt could use now, with its client and its rank (see `policy.py`)."""

    n_rows: int
    client: str
    rank: int


def share_rows(demands: Sequence[Demand], room: int) -> list[int]:
    """How many of `room` prompt rows each one gets: in sum all of `room`, or all that is wanted.

    The rows are divided between ranks by weight, and within a rank equally between clients. Of a client's requests, the
    one with the fewest rows left goes first, except for a quarter that all of them share. Unneeded rows go to the
    others. So a short prompt neither queues behind a long one nor stops it, a client gains nothing by asking twice, and
    a lower lane is slowed down but not stopped. Equal prompts are computed one after another, because in equal parts
    they would all finish last.

    Shares are cut to whole granules if another prompt can use the rest: a backend with separate streams computes equal
    numbers of rows together, and any excess in a pass of its own.
    """
    if len(demands) < 2:
        return [max(0, min(demand.n_rows, room)) for demand in demands]
    dealt = [0] * len(demands)
    ranks: dict[int, dict[str, list[int]]] = {}
    for index, demand in enumerate(demands):
        ranks.setdefault(max(0, demand.rank), {}).setdefault(demand.client, []).append(index)
    by_rank = [[sum(demands[index].n_rows for index in own) for own in clients.values()] for clients in ranks.values()]
    rank_rooms = _fill([sum(rows) for rows in by_rank], [_WEIGHTS[rank] for rank in ranks], max(0, room))
    for clients, client_rows, rank_room in zip(ranks.values(), by_rank, rank_rooms, strict=True):
        client_rooms = _fill(client_rows, [1] * len(clients), rank_room)
        for own, client_room in zip(clients.values(), client_rooms, strict=True):
            rows = _shortest_first([demands[index].n_rows for index in own], client_room)
            for index, n_rows in zip(own, rows, strict=True):
                dealt[index] = n_rows
    return _in_granules(demands, dealt)


def _fill(demands: list[int], weights: list[int], room: int) -> list[int]:
    """Rows in proportion to the weights, as far as the wants allow: in sum min(room, sum(wants))."""
    dealt = [0] * len(demands)
    weight_left = sum(weights)
    for index in sorted(range(len(demands)), key=lambda index: demands[index] / weights[index]):
        dealt[index] = min(demands[index], room * weights[index] // weight_left)
        room -= dealt[index]
        weight_left -= weights[index]
    return dealt


def _shortest_first(demands: list[int], room: int) -> list[int]:
    """The rows of one client's requests: in sum min(room, sum(wants)). Either all of them share the quarter, or only
    the longest gets a granule: a backend with separate streams needs another pass for every other length."""
    dealt = [0] * len(demands)
    if room // _PART_FOR_ALL >= GRANULE_ROWS * len(demands):
        dealt = _fill(demands, [1] * len(demands), room // _PART_FOR_ALL)
    elif len(demands) > 1 and max(demands) > _LONG_ROWS:
        dealt[demands.index(max(demands))] = min(GRANULE_ROWS, room)
    left = min(room, sum(demands)) - sum(dealt)
    for index in sorted(range(len(demands)), key=demands.__getitem__):
        more = min(demands[index] - dealt[index], left)
        dealt[index] += more
        left -= more
    return dealt


def _in_granules(demands: Sequence[Demand], dealt: list[int]) -> list[int]:
    """Cut shares to whole granules and deal the excess again, a granule each, smallest share first."""
    cut = [i for i, n_rows in enumerate(dealt) if GRANULE_ROWS <= n_rows < demands[i].n_rows]
    spare = 0
    for index in cut:
        spare += dealt[index] % GRANULE_ROWS
        dealt[index] -= dealt[index] % GRANULE_ROWS
    for index in sorted(cut, key=dealt.__getitem__):
        more = min(spare, GRANULE_ROWS, demands[index].n_rows - dealt[index])
        dealt[index] += more
        spare -= more
    return dealt


# Sets with the longest memory of their last turn; of the others it is forgotten, and they go first.
_MOST_SETS = 256
# Rounds that say how long the next one will take: few, because streams come and go.
_N_RECENT = 8


class TurnOrder:
    """Whose turn it is: the set's whose last one is the longest ago, and among new ones the first one's."""

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}
        self._n_turns = 0

    def order(self, groups: Iterable[bytes]) -> list[bytes]:
        """The sets with these names, in the order of their next turns."""
        return sorted(groups, key=lambda group: self._turns.get(group, 0))

    def took(self, group: bytes) -> None:
        """A set had its turn."""
        self._n_turns += 1
        self._turns.pop(group, None)
        self._turns[group] = self._n_turns
        if len(self._turns) > _MOST_SETS:
            del self._turns[next(iter(self._turns))]


class AdapterRounds:
    """Which set of adapters a step computes with, where running requests have several.

    A native call has one set, and a change of it has llama.cpp build its graphs anew (`budget.py` learns what that
    costs). So the rows of a step are those of one set, as many as are due, and the sets take turns: in a *round* each
    of them has one step. Between two steps of a stream every other set has at most one, so nobody waits for more than a
    round, and if rounds take longer than the streams' target, all intervals grow alike. A single set's step is a round
    of its own. The last whole round ended at `ended_at_s`."""

    def __init__(self) -> None:
        self.ended_at_s = -math.inf
        self._ring = TurnOrder()
        self._left: list[bytes] = []
        self._so_far_s = 0.0
        self._has_drafts = False
        self._recent_s: deque[float] = deque(maxlen=_N_RECENT)

    @property
    def usual_s(self) -> float:
        """How long a round without drafts takes: the median of the latest; 0 before the first one."""
        return statistics.median_low(self._recent_s) if self._recent_s else 0.0

    @property
    def long_s(self) -> float:
        """What such a round seldom exceeds: the longest of the latest but for one, which may have met a busy core."""
        return sorted(self._recent_s)[-2] if len(self._recent_s) > 1 else self.usual_s

    def next(self, groups: Collection[bytes]) -> bytes:
        """The set whose turn it is, of those that have something to compute."""
        return next((group for group in self._left if group in groups), self._ring.order(groups)[0])

    def is_open(self, groups: Collection[bytes]) -> bool:
        """Whether some of these sets still have their step of the round under way."""
        return any(group in groups for group in self._left)

    def note_only(self, group: bytes, step_s: float, ended_at_s: float, *, has_drafts: bool) -> float:
        """The only set that is left had its step, which is a round. Returns how long it took."""
        self._ring.took(group)
        self._left = []
        self._so_far_s, self._has_drafts = step_s, has_drafts
        return self._end(ended_at_s)

    def note(
        self, group: bytes, groups: Collection[bytes], step_s: float, ended_at_s: float, *, has_drafts: bool
    ) -> float | None:
        """A set had its step; `groups` are those that will have something to compute now. Returns how long the round
        took if that was the last of it."""
        if group not in self._left:
            self._left = self._ring.order(dict.fromkeys([group, *groups]))
            self._so_far_s, self._has_drafts = 0.0, False
        self._so_far_s += step_s
        self._has_drafts |= has_drafts
        self._ring.took(group)
        self._left = [other for other in self._left if other in groups and other != group]
        return None if self._left else self._end(ended_at_s)

    def _end(self, ended_at_s: float) -> float:
        # Rounds with drafts take several times as long. Beside prompts there are none, so they say nothing of those.
        if not self._has_drafts:
            self._recent_s.append(self._so_far_s)
        self.ended_at_s = ended_at_s
        return self._so_far_s
