"""Several replicas behind a router, in one virtual time, and how many of them a rate needs.

Each replica has its own clock; the one that is furthest behind goes on, and a request is routed when all that compute
have come to its arrival (coarse ones: when none of them changes before it). A router sees what it sent and what came
back, never a replica's cache. Up to `MOST_EXACT` replicas are simulated as one is (`replica.py`). More are simulated
coarsely (`coarse.py`), and some of them, drawn at random, exactly, with the requests that the router sent to them: what
these say is what is told, with how far off the coarse ones were.

Does not: scale while it runs, or lose replicas.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from localrun.bench.arrivals import Limits, Session, Turn, Workload
from localrun.bench.results import StreamRecord
from localrun.cluster.affinity import BLOCK_TOKENS, BYTES_PER_TOKEN, Affinity, blocks
from localrun.errors import BadRequest
from localrun.plan.backend import SimBackend
from localrun.plan.coarse import CoarseReplica
from localrun.plan.costs import Account, VirtualClock
from localrun.plan.replica import (
    Arrival,
    Outcome,
    Replica,
    Setup,
    arrivals_of,
    is_drafted,
    simulate,
    without_collecting,
)
from localrun.plan.search import N_REQUESTS, Point, check_asked, point_of

MOST_EXACT = 16
N_SAMPLED = 6
# A router that looks at all replicas for each request.
MOST_LOOKED_AT = 128
MOST_REPLICAS = 10_000
REQUESTS_OF_EACH = 60
# Before a wait for others' clocks is a step by itself.
_LEAST_S = 1e-3


OneOfFleet = Replica | CoarseReplica
Choose = Callable[[Arrival, Sequence[OneOfFleet]], int]
"""Which replica gets a request, by what is under way on each of them."""


def _round_robin(_seed: int) -> Choose:
    numbers = itertools.count(1)
    return lambda arrival, replicas: next(numbers) % len(replicas)


def _by_session(seed: int) -> Choose:
    """What a cookie gives."""
    return lambda arrival, replicas: random.Random(f"{seed}/{arrival.number}").randrange(len(replicas))


def _two_choices(seed: int) -> Choose:
    """The one of two random replicas that has fewer requests (Mitzenmacher 2001)."""
    chance = random.Random(seed)

    def choose(arrival: Arrival, replicas: Sequence[OneOfFleet]) -> int:
        two = (chance.randrange(len(replicas)), chance.randrange(len(replicas)))
        return min(two, key=lambda index: replicas[index].n_running)

    return choose


def _least_requests(seed: int) -> Choose:
    chance = random.Random(seed)
    return lambda arrival, replicas: min(
        range(len(replicas)), key=lambda index: (replicas[index].n_running, chance.random())
    )


def _by_prefix(_seed: int) -> Choose:
    """What doors of a cluster do: the same code, by what they would know of each replica."""
    affinity = Affinity()

    def choose(arrival: Arrival, replicas: Sequence[OneOfFleet]) -> int:
        prompt = blocks(_bytes_of(arrival.session.turns[arrival.turn]))
        waiting = {
            str(index): float(sum(_left_tokens(record, known) for record, known in replica.running))
            for index, replica in enumerate(replicas)
        }
        chosen = affinity.choose(prompt, waiting)
        affinity.note(prompt, chosen)
        return int(chosen)

    return choose


ROUTERS: dict[str, Callable[[int], Choose]] = {
    "prefix": _by_prefix,
    "session": _by_session,
    "least-requests": _least_requests,
    "two-choices": _two_choices,
    "round-robin": _round_robin,
}
"""By name, what makes one from a seed."""


def _left_tokens(record: StreamRecord, turn: Turn) -> int:
    """As a door counts (`cluster/frames.py`), which hears of a slot what is cached: what a prompt has left, and one
    block for an answer."""
    if record.arrivals_s:
        return BLOCK_TOKENS
    return (record.n_prompt - record.n_cached or turn.n_prompt) + BLOCK_TOKENS


def _bytes_of(turn: Turn) -> list[bytes]:
    """A text of this length for each part, the same for the same part."""
    return [
        (name.encode() * (n_tokens * BYTES_PER_TOKEN // len(name) + 1))[: n_tokens * BYTES_PER_TOKEN]
        for name, n_tokens in turn.parts
    ]


class FleetOutcome(NamedTuple):
    """Of all replicas together, or of those that were drawn, which are `share` of them. `fullest` is the tokens of the
    one that got most, by the mean; `prompt_tokens` has those of all. `coarse_error` is of the coarse replicas' time to
    first token, in the median; None where all are exact."""

    records: list[StreamRecord]
    busy: float
    share: float
    fullest: float
    coarse_error: float | None
    prompt_tokens: list[int]


class FleetPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What `n_replicas` do at a rate, with a router. See `FleetOutcome`."""

    n_replicas: int
    router: str
    point: Point
    fullest: float
    coarse_error: float | None = None


def check_size(n_replicas: int, router: str) -> None:
    """Raises BadRequest for more than can be simulated, or than this router can."""
    if n_replicas > MOST_REPLICAS:
        raise BadRequest(
            f"about {n_replicas:,} replicas would be needed, and at most {MOST_REPLICAS:,} are simulated; a lower "
            "--rate needs fewer",
            field="replicas",
        )
    if n_replicas > MOST_LOOKED_AT and router in ("prefix", "least-requests"):
        raise BadRequest(
            f"{router} looks at all replicas for each request, and more than {MOST_LOOKED_AT} take too long to "
            "simulate; try session or two-choices",
            field="router",
        )


def fleet(
    setup: Setup, sessions: Sequence[Session], rate_per_s: float, *, n_replicas: int, router: str, seed: int = 1
) -> FleetOutcome:
    """Let sessions arrive, and run until all requests are over. Raises what `check_size` does."""
    check_size(n_replicas, router)
    setup = setup._replace(speculates=setup.speculates and is_drafted(sessions))
    with without_collecting():
        replicas: list[OneOfFleet] = [
            _exact(setup, seed + index) if n_replicas <= MOST_EXACT else CoarseReplica(setup)
            for index in range(n_replicas)
        ]
        routed = _run(replicas, arrivals_of(sessions, rate_per_s), ROUTERS[router](seed))
        tokens = [sum(arrival.session.turns[arrival.turn].n_prompt for arrival in each) for each in routed]
        fullest = max(tokens) * n_replicas / max(1, sum(tokens))
        seconds = max(replica.clock.now_s for replica in replicas)
        idle_s = sum(seconds - replica.clock.now_s + replica.clock.spent_s[Account.IDLE] for replica in replicas)
        busy = 1 - idle_s / max(1e-9, n_replicas * seconds)
        records, share, error = [record for replica in replicas for record in replica.records], 1.0, None
        if n_replicas > MOST_EXACT:
            records, error = _sampled(setup, replicas, routed, seed)
            share = min(N_SAMPLED, sum(map(bool, routed))) / n_replicas
    records.sort(key=lambda record: record.intended_at_s)
    return FleetOutcome(records, busy, share, fullest, error, tokens)


class FleetSearch:
    """How many replicas keep a promise at a rate, and what each router makes of them."""

    def __init__(self, setup: Setup, workload: Workload, limits: Limits, rate_per_s: float, *, seed: int = 1) -> None:
        self._setup, self._workload, self._limits, self._rate_per_s = setup, workload, limits, rate_per_s
        self._seed = seed

    def of(self, n_replicas: int, router: str) -> FleetPoint:
        """So many. Raises BadRequest."""
        check_size(n_replicas, router)
        sessions = self._workload.sessions(max(N_REQUESTS, REQUESTS_OF_EACH * n_replicas), self._seed)
        check_asked(self._setup, self._workload, sessions, self._rate_per_s, self._limits.share)
        found = fleet(
            self._setup, sessions, self._rate_per_s, n_replicas=n_replicas, router=router, seed=self._seed
        )  # fmt: skip
        outcome = Outcome(found.records, {}, 0.0, 0, 0, 0.0)
        n_warm = len(found.records) // 10
        point = point_of(outcome, self._workload, self._rate_per_s, self._limits, n_warm)
        point = msgspec.structs.replace(point, tokens_per_s=point.tokens_per_s / found.share, busy=found.busy)
        return FleetPoint(
            n_replicas=n_replicas, router=router, point=point, fullest=found.fullest, coarse_error=found.coarse_error
        )

    def least(self, router: str, near: int) -> FleetPoint:
        """The fewest that keep it, beginning with a guess. Raises BadRequest where `MOST_REPLICAS` do not."""
        least_kept, most_broken, n_replicas = None, 0, max(1, near)
        while least_kept is None or most_broken + 1 < least_kept.n_replicas:
            found = self.of(n_replicas, router)
            if found.point.kept >= self._limits.share:
                least_kept = found
            else:
                most_broken = n_replicas
            if least_kept is None:
                if n_replicas >= MOST_REPLICAS:
                    raise BadRequest(f"not even {MOST_REPLICAS} replicas keep this promise", field="replicas")
                n_replicas = min(MOST_REPLICAS, n_replicas + max(1, n_replicas // 4))
            else:
                step = max(1, (least_kept.n_replicas - most_broken) // 4)
                n_replicas = least_kept.n_replicas - step
        return least_kept


def _exact(setup: Setup, seed: int) -> Replica:
    clock = VirtualClock()
    return Replica(setup, SimBackend(setup.layout, setup.costs, clock, seed), clock, [], 1.0)


def _run(replicas: Sequence[OneOfFleet], arrivals: list[Arrival], choose: Choose) -> list[list[Arrival]]:
    """What each replica was sent."""
    routed: list[list[Arrival]] = [[] for _ in replicas]
    behind: list[tuple[float, int]] = []  # those that compute, by their clocks
    for replica in replicas:
        replica.on_turn = lambda arrival: heappush(arrivals, arrival)
    while arrivals or behind:
        next_s = arrivals[0].at_s if arrivals else float("inf")
        if behind and behind[0][0] < next_s:
            at_s, index = heappop(behind)
            replica = replicas[index]
            if at_s != replica.next_s:  # something has come between
                continue
            # No further than the others: what they finish may be what it gets next.
            others_s = behind[0][0] if behind else next_s
            replica.advance(min(next_s, max(others_s, at_s + _LEAST_S)))
        else:
            arrival = heappop(arrivals)
            index = choose(arrival, replicas)
            replica = replicas[index]
            routed[index].append(arrival)
            was_waiting_for_s = replica.next_s if replica.is_busy else None
            replica.arrive(arrival)
            if was_waiting_for_s == replica.next_s:
                continue
        if replica.is_busy:
            heappush(behind, (replica.next_s, index))
    return routed


def _sampled(
    setup: Setup, coarse: Sequence[OneOfFleet], routed: Sequence[list[Arrival]], seed: int
) -> tuple[list[StreamRecord], float]:
    """Some replicas' requests again, exactly: their records, and by how much the coarse ones differ."""
    asked = [index for index, each in enumerate(routed) if each]
    chosen = random.Random(seed).sample(asked, min(N_SAMPLED, len(asked)))
    records: list[StreamRecord] = []
    rough: list[float] = []
    for index in chosen:
        alone = [Session(each.at_s, (each.session.turns[each.turn],)) for each in routed[index]]
        outcome: Outcome = simulate(setup, alone, 1.0, seed=seed + index)
        records += outcome.records
        rough += [record.ttft_s for record in coarse[index].records if record.is_complete]
    exact = [record.ttft_s for record in records if record.is_complete]
    if not exact or not rough:
        return records, 1.0
    return records, statistics.median(rough) / statistics.median(exact) - 1
