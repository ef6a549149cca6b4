"""Several replicas behind a router, in one virtual time, and how many of them a rate needs.

Each replica has its own clock; the one that is furthest behind goes on, and a request is routed when all that compute
have come to its arrival (coarse ones: when none of them changes before it). A router sees what it sent and what came
back, never a replica's cache. Up to `MOST_EXACT` replicas are simulated as one is (`replica.py`). More are simulated
coarsely (`CoarseReplica`), and some of them, drawn at random, exactly, with the requests that the router sent to them:
what these say is what is told, with how far off the coarse ones were.

Does not: scale while it runs, or lose replicas.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from localrun.bench.arrivals import Limits, Session, Turn, Workload
from localrun.bench.results import StreamRecord
from localrun.cluster.affinity import BLOCK_TOKENS, BYTES_PER_TOKEN, Affinity, blocks
from localrun.errors import BadRequest
from localrun.plan.backend import SimBackend
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


class _Request:
    def __init__(self, arrival: Arrival, record: StreamRecord) -> None:
        self.arrival, self.record = arrival, record
        self.turn: Turn = arrival.session.turns[arrival.turn]
        self.left = 0.0  # seconds of its prompt, then tokens of its answer


class CoarseReplica:
    """A replica by requests instead of steps, with the same face as `replica.Replica` for a fleet: slots, one prompt at
    a time, streams that share.

    While a prompt is computed, streams get a step every `target_itl_s`, and the prompt the time between. Without a
    prompt, streams step as fast as they can. What changes that is an arrival, the end of a prompt or the end of an
    answer, and between two of these everything goes on evenly. The cache remembers whole prompts and answers by their
    parts, the last used first, for as many tokens as its memory has.

    Does not: know lanes, batches, or a prompt's parts that are computed with the streams.
    """

    def __init__(self, setup: Setup) -> None:
        self.clock = VirtualClock()
        self.records: list[StreamRecord] = []
        self.on_turn: Callable[[Arrival], None] = self.arrive
        self._layout, self._costs = setup.layout, setup.costs
        self._target_s = setup.target_itl_s
        self.next_s = math.inf  # when something changes by itself
        self._interval_s, self._prompt_share = 0.0, 1.0
        self._waiting: deque[_Request] = deque()
        self._prompts: deque[_Request] = deque()
        self._streams: list[_Request] = []
        n_ram = setup.ram_cache_bytes // max(1, setup.layout.state_token_bytes)
        self._most_tokens = setup.layout.n_cells + n_ram
        self._kept: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self._n_kept = 0

    @property
    def is_busy(self) -> bool:
        return self.n_running > 0

    @property
    def running(self) -> list[tuple[StreamRecord, Turn]]:
        return [(each.record, each.turn) for each in (*self._waiting, *self._prompts, *self._streams)]

    @property
    def n_running(self) -> int:
        return len(self._waiting) + len(self._prompts) + len(self._streams)

    def arrive(self, arrival: Arrival) -> None:
        """Now: it has come to this time."""
        self._go_on(max(arrival.at_s, self.clock.now_s))
        turn = arrival.session.turns[arrival.turn]
        record = StreamRecord(
            intended_at_s=arrival.at_s, sent_at_s=arrival.at_s, client=turn.client, lane=turn.lane, status=200
        )
        self.records.append(record)
        self._waiting.append(_Request(arrival, record))
        self._start()
        self._look_ahead()

    def advance(self, until_s: float) -> None:
        """To the next change, which is not after `until_s`."""
        self._go_on(self.next_s)
        if self._prompts and self._prompts[0].left <= 1e-9:
            self._begin_answer(self._prompts.popleft())
        for each in [each for each in self._streams if each.left <= 1e-6]:
            self._end(each)
        self._look_ahead()

    def _go_on(self, until_s: float) -> None:
        passed_s = until_s - self.clock.now_s
        if passed_s <= 0:
            return
        doing = Account.DECODE if self._streams else Account.PROMPTS if self.is_busy else Account.IDLE
        self.clock.spend(passed_s, doing)
        if self._prompts:
            self._prompts[0].left -= passed_s * self._prompt_share
        for each in self._streams:
            each.left -= passed_s / self._interval_s

    def _look_ahead(self) -> None:
        self._interval_s, self._prompt_share = self._pace()
        now_s, self.next_s = self.clock.now_s, math.inf
        if self._prompts:
            self.next_s = now_s + max(0.0, self._prompts[0].left) / self._prompt_share
        if self._streams:
            least = min(each.left for each in self._streams)
            self.next_s = min(self.next_s, now_s + max(0.0, least) * self._interval_s)

    def _pace(self) -> tuple[float, float]:
        """Seconds between two steps of the streams, and the share of the time that the first prompt has."""
        if not self._streams:
            return 0.0, 1.0
        step_s = self._step_s(self._streams)
        if not self._prompts:
            return step_s, 0.0
        waits = self._costs.waits
        beside_s = step_s + (waits.extra_s(waits.batches_s[-1], 0.5) if waits else 0.0)
        interval_s = max(self._target_s, 2 * beside_s)
        return interval_s, 1 - beside_s / interval_s

    def _step_s(self, streams: Sequence[_Request]) -> float:
        costs, n = self._costs, len(streams)
        tokens = sum(each.turn.n_prompt + each.turn.n_output / 2 for each in streams)
        return costs.streams.step_s(n, tokens) + costs.host_s + n * (costs.host_row_s + costs.delta_s)

    def _start(self) -> None:
        while self._waiting and len(self._streams) + len(self._prompts) < self._layout.slots:
            request = self._waiting.popleft()
            record, turn = request.record, request.turn
            record.n_prompt = turn.n_prompt
            record.n_cached = min(self._known(turn), turn.n_prompt - 1)
            n_new, depth = record.n_prompt - record.n_cached, record.n_cached
            while n_new > 0:
                n_rows = min(n_new, self._layout.n_batch)
                request.left += self._costs.background.batch_s(n_rows, depth)
                n_new, depth = n_new - n_rows, depth + n_rows
            self._prompts.append(request)

    def _begin_answer(self, request: _Request) -> None:
        # The last token of a prompt is computed with the streams.
        step_s = self._step_s([*self._streams, request])
        request.record.arrivals_s.append(self.clock.now_s + self._costs.request_s + step_s)
        request.left = float(request.turn.n_output - 1)
        self._streams.append(request)
        if request.left <= 0:
            self._end(request)

    def _end(self, request: _Request) -> None:
        self._streams.remove(request)
        record, turn = request.record, request.turn
        now_s, first_s = self.clock.now_s, record.arrivals_s[0]
        record.arrivals_s.append(max(now_s, first_s))
        record.ended_at_s, record.n_output = record.arrivals_s[-1], turn.n_output
        self._keep(turn)
        arrival = request.arrival
        if arrival.turn + 1 < len(arrival.session.turns):
            later = arrival.session.turns[arrival.turn + 1]
            self.on_turn(arrival._replace(at_s=now_s + later.think_s, turn=arrival.turn + 1))
        self._start()

    def _known(self, turn: Turn) -> int:
        """Tokens of its beginning that are in the cache."""
        names = tuple(name for name, _ in turn.parts)
        for n_parts in range(len(names), 0, -1):
            if names[:n_parts] in self._kept:
                self._kept.move_to_end(names[:n_parts])
                return sum(n_tokens for _, n_tokens in turn.parts[:n_parts])
        return 0

    def _keep(self, turn: Turn) -> None:
        names = tuple(name for name, _ in turn.parts)
        for n_parts in range(1, len(names) + 1):
            own = turn.parts[n_parts - 1][1]
            if names[:n_parts] not in self._kept:
                self._kept[names[:n_parts]] = own
                self._n_kept += own
            self._kept.move_to_end(names[:n_parts])
        while self._n_kept > self._most_tokens:
            _, n_tokens = self._kept.popitem(last=False)
            self._n_kept -= n_tokens


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
            # No further than a step: what others finish may be what it gets next.
            replica.advance(at_s)
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
