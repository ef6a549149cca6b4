"""One engine in virtual time: requests go in when they arrive, and what clients see of them comes out as records.

`run_steps` is to a simulated engine what `engine/pipes.run_steps` is to a real one: it steps, sleeps as long as the
engine says, and is woken by an arrival or by the end of a batch in the background.

Does not: decide anything that the engine decides.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import NamedTuple
from zlib import crc32

from localrun.bench.arrivals import ANSWER, Session, Turn
from localrun.bench.arrivals import Limits as Promise
from localrun.bench.metrics import is_good
from localrun.bench.results import StreamRecord
from localrun.config import Settings
from localrun.engine.engine import Engine, Limits
from localrun.engine.schedule.scheduler import StepPlan
from localrun.engine.speculate.speculation import Speculation
from localrun.plan.backend import MOST_TOKENS, Layout, SimBackend, SimDisk, tokens_of
from localrun.plan.costs import Account, Costs, VirtualClock
from localrun.wire import Finish, Sampling, Step, Submit

# A look of the engine at nothing.
_LOOK_S = 1e-4
# How often, in steps, it is asked whether a run is lost.
_ASK_STEPS = 64
_ON_ITS_WAY = StreamRecord(intended_at_s=0.0, sent_at_s=0.0)


# The tokens of parts that are known, by name; those of others are numbers that nothing else has.
Texts = Mapping[str, Sequence[int]]


class Setup(NamedTuple):
    """A machine with a model, as the daemon would open it. What follows the costs are settings."""

    layout: Layout
    costs: Costs
    target_itl_s: float
    ram_cache_bytes: int
    max_queue: int
    speculates: bool = True
    disk_cache_bytes: int = 0

    @classmethod
    def of(cls, layout: Layout, costs: Costs, settings: Settings) -> Setup:
        return cls(
            layout,
            costs,
            settings.target_itl_s,
            settings.ram_cache_bytes,
            settings.max_queue,
            settings.speculation == "on",
            settings.disk_cache_bytes,
        )


class Outcome(NamedTuple):
    """`records` are those of the requests that arrived, in order of arrival; times are virtual. `is_given_up`: it was
    certain that too few would be good. `blocked_s`: how long requests waited for KV cells while slots were free."""

    records: list[StreamRecord]
    spent_s: dict[Account, float]
    seconds: float
    n_steps: int
    n_preempted: int
    blocked_s: float
    is_given_up: bool = False


class Arrival(NamedTuple):
    """A turn of a session, the first of which is 0. `number` is the session's."""

    at_s: float
    number: int
    session: Session
    turn: int


def arrivals_of(sessions: Sequence[Session], rate_per_s: float) -> list[Arrival]:
    """The first turns, as a heap."""
    arrivals = [Arrival(each.at / rate_per_s, at, each, 0) for at, each in enumerate(sessions)]
    heapify(arrivals)
    return arrivals


def is_drafted(sessions: Sequence[Session], texts: Texts | None = None) -> bool:
    """Whether drafts can be found for anybody. Where no token comes twice the engine need not look."""
    return bool(texts) or any(turn.repeats for session in sessions for turn in session.turns)


def seed_of(name: str) -> int:
    """What the tokens of a part depend on."""
    return crc32(name.encode()) | len(name) % 128 << 32


def simulate(
    setup: Setup,
    sessions: Sequence[Session],
    rate_per_s: float,
    *,
    seed: int = 1,
    promise: Promise | None = None,
    n_warm: int = 0,
    texts: Texts | None = None,
) -> Outcome:
    """Let sessions arrive at this rate, and run until all requests are over; with a promise only until it is certain
    that too few of those behind the first `n_warm` keep it."""
    setup = setup._replace(speculates=setup.speculates and is_drafted(sessions, texts))
    with without_collecting():
        clock = VirtualClock()
        backend = SimBackend(setup.layout, setup.costs, clock, seed)
        return Replica(setup, backend, clock, sessions, rate_per_s, promise, n_warm, texts).run()


class Replica:
    """See the module; `simulate` makes one. Another `on_turn` than its own gets the turns that follow on an answer."""

    def __init__(
        self,
        setup: Setup,
        backend: SimBackend,
        clock: VirtualClock,
        sessions: Sequence[Session],
        rate_per_s: float,
        promise: Promise | None = None,
        n_warm: int = 0,
        texts: Texts | None = None,
    ) -> None:
        self.clock, self.backend, self._texts = clock, backend, texts or {}
        limits = Limits(setup.layout.slots, setup.max_queue, setup.target_itl_s, setup.ram_cache_bytes)
        self.engine = Engine(
            self.backend,
            limits,
            self.clock,
            SimDisk(setup.disk_cache_bytes, setup.costs.disk_byte_s, clock) if setup.disk_cache_bytes else None,
            beside=None,  # the map of KV cells is for people who watch
            speculation=(Speculation if setup.speculates else _NoDrafts)(backend, clock, is_on=setup.speculates),
            checks_books=False,  # once at the end is enough: virtual time brings thousands of idle moments a second
        )
        self._costs = setup.costs
        self._arrivals = arrivals_of(sessions, rate_per_s)
        self.on_turn: Callable[[Arrival], None] = self.arrive
        self.records: list[StreamRecord] = []
        self._running: dict[int, tuple[StreamRecord, Arrival]] = {}
        self._n_steps = 0
        self._blocked_s = 0.0
        self._wakes_s, self._sleeps_as = 0.0, Account.IDLE
        self._promise, self._n_warm = promise, n_warm
        n_counted = sum(len(each.turns) for each in sessions) - n_warm
        self._n_may_fail = n_counted * (1 - promise.share) if promise else 0.0
        self._n_failed = 0

    def arrive(self, arrival: Arrival) -> None:
        heappush(self._arrivals, arrival)

    @property
    def is_busy(self) -> bool:
        return bool(self._arrivals or self._running or not self.engine.is_idle)

    @property
    def next_s(self) -> float:
        """Where it goes on: an idle one when something arrives."""
        if self._wakes_s > self.clock.now_s:
            return self._woken_s
        if self._running or not self.engine.is_idle or not self._arrivals:
            return self.clock.now_s
        return max(self.clock.now_s, self._arrives_s)

    @property
    def _arrives_s(self) -> float:
        """When the next request is here."""
        return self._arrivals[0].at_s + self._costs.request_s if self._arrivals else math.inf

    @property
    def _woken_s(self) -> float:
        """When it really wakes: an arrival ends its sleep."""
        return max(self.clock.now_s, min(self._wakes_s, self._arrives_s))

    def _sleep(self) -> None:
        self.clock.sleep_until(self._woken_s, self._sleeps_as)
        self._wakes_s = 0.0

    @property
    def n_running(self) -> int:
        return len(self._running) + len(self._arrivals)

    @property
    def running(self) -> list[tuple[StreamRecord, Turn]]:
        """The requests that it has, waiting ones included, and those on their way to it."""
        has = [(record, arrival.session.turns[arrival.turn]) for record, arrival in self._running.values()]
        return has + [(_ON_ITS_WAY, arrival.session.turns[arrival.turn]) for arrival in self._arrivals]

    def run(self) -> Outcome:
        is_given_up = False
        while self.is_busy and not is_given_up:
            self.advance()
            is_given_up = self._promise is not None and self._n_steps % _ASK_STEPS == 0 and self._is_lost()
        self.engine.cache.check_integrity()
        return self.outcome(is_given_up=is_given_up)

    def advance(self, until_s: float = math.inf) -> None:
        """One step, or a sleep. A step may be late, but a sleep that is over after `until_s` is kept for then."""
        if self._wakes_s > self.clock.now_s:
            self._sleep()
        self._submit_due()
        if self._running or not self.engine.is_idle:
            self._step(until_s)
        elif self._arrivals:
            self.clock.sleep_until(min(until_s, self._arrives_s), Account.IDLE)

    def outcome(self, *, is_given_up: bool = False) -> Outcome:
        return Outcome(
            self.records,
            self.clock.spent_s,
            self.clock.now_s,
            self._n_steps,
            self.engine.totals.preemptions,
            self._blocked_s,
            is_given_up,
        )

    def _submit_due(self) -> None:
        """A request is on its way for a moment: a thread beside the steps makes tokens of it."""
        while self._arrives_s <= self.clock.now_s:
            arrival = heappop(self._arrivals)
            turn = arrival.session.turns[arrival.turn]
            request_id = len(self.records) + 1
            record = StreamRecord(
                intended_at_s=arrival.at_s, sent_at_s=arrival.at_s, client=turn.client, lane=turn.lane, status=200
            )
            self.records.append(record)
            self._running[request_id] = record, arrival
            prompt = prompt_tokens(turn, self._texts)
            self.backend.says = answer_tokens(turn, prompt, self._texts)
            self.engine.submit(_submit(request_id, turn, arrival.at_s), prompt)

    def _step(self, until_s: float) -> None:
        engine, clock = self.engine, self.clock
        self._n_steps += 1
        before_s = clock.now_s
        step = engine.step()
        is_blocked = bool(engine.scheduler.waiting) and engine.scheduler.has_free_slot
        if step is not None:
            self._publish(step)
        if engine.wait_s:
            worker = self.backend.worker
            is_computing = worker is not None and worker.is_busy
            self._wakes_s = clock.now_s + engine.wait_s
            if worker is not None and is_computing:
                self._wakes_s = min(self._wakes_s, max(clock.now_s, worker.ends_at_s))
            self._sleeps_as = Account.PROMPTS if is_computing else Account.IDLE
            if self._woken_s <= until_s:
                self._sleep()
        if clock.now_s == before_s and self._wakes_s <= before_s:
            clock.spend(_LOOK_S, Account.HOST)
        if is_blocked:
            self._blocked_s += clock.now_s - before_s

    def _publish(self, step: Step) -> None:
        """What a step took besides computing, and what clients see of it."""
        costs, clock = self._costs, self.clock
        clock.spend(costs.host_s + costs.host_row_s * len(step.deltas), Account.HOST)
        for started in step.started:
            record = self._running[started.id][0]
            record.n_prompt, record.n_cached = started.n_prompt, started.n_cached
        n_delivered = sum(bool(delta.tokens) for delta in step.deltas)
        clock.spend(costs.delta_s * n_delivered, Account.DAEMON)
        for delta in step.deltas:
            record, arrival = self._running[delta.id]
            if delta.tokens:
                record.arrivals_s.append(clock.now_s)
            if delta.finish is None:
                continue
            del self._running[delta.id]
            record.ended_at_s, record.n_output = clock.now_s, delta.n_output
            record.n_drafted, record.n_accepted = delta.n_drafted, delta.n_accepted
            if delta.finish is not Finish.LENGTH:
                record.problem = delta.error_message or delta.finish.value
                record.status = 429 if delta.retry_after_s is not None else 500
            if (promise := self._promise) is not None and delta.id > self._n_warm:
                limits = {"ttft_limit_s": promise.ttft_limit_s, "itl_limit_s": promise.itl_limit_s}
                self._n_failed += not is_good(record, **limits)
            if arrival.turn + 1 < len(arrival.session.turns):
                think_s = arrival.session.turns[arrival.turn + 1].think_s
                self.on_turn(arrival._replace(at_s=clock.now_s + think_s, turn=arrival.turn + 1))

    def _is_lost(self) -> bool:
        """Whether too many requests have failed, or are waiting too long already."""
        assert self._promise is not None
        limit_s, now_s = self._promise.ttft_limit_s, self.clock.now_s
        n_late = sum(
            number > self._n_warm and not record.arrivals_s and now_s - record.intended_at_s > limit_s
            for number, (record, _) in self._running.items()
        )
        return self._n_failed + n_late > self._n_may_fail


def _submit(request_id: int, turn: Turn, at_s: float) -> Submit:
    return Submit(
        id=request_id,
        sampling=Sampling(temperature=0),
        n_predict=turn.n_output,
        ignore_eos=True,
        client=turn.client,
        lane=turn.lane,
        target_itl_s=turn.target_itl_s,
        arrived_at_s=at_s,
    )


def prompt_tokens(turn: Turn, texts: Texts | None = None) -> list[int]:
    tokens: list[int] = []
    for name, n_tokens in turn.parts:
        known = texts.get(name) if texts else None
        if known is None and turn.repeats and name.endswith(ANSWER):
            known = list(islice(_repeating(tuple(tokens), name, turn.repeats), n_tokens))
        tokens += tokens_of(seed_of(name), n_tokens) if known is None else known
    return tokens


def answer_tokens(turn: Turn, prompt: Sequence[int], texts: Texts | None = None) -> Iterable[int]:
    """The answer to it, and more where that is not known."""
    name = turn.parts[-1][0] + ANSWER
    if texts and name in texts:
        return chain(texts[name], tokens_of(seed_of(name), MOST_TOKENS))
    if turn.repeats:
        return _repeating(tuple(prompt), name, turn.repeats)
    return tokens_of(seed_of(name), MOST_TOKENS)


def _repeating(prompt: Sequence[int], name: str, share: float) -> Iterator[int]:
    """Goes through the prompt from somewhere on, token by token, and says something else instead of every so many."""
    chance, own = random.Random(name), iter(tokens_of(seed_of(name), MOST_TOKENS))
    at = chance.randrange(len(prompt))
    while True:
        yield prompt[at % len(prompt)] if chance.random() < share else next(own)
        at += 1


class _NoDrafts(Speculation):
    """Nothing has to be learned of drafts where there are none."""

    def extend(
        self, plan: StepPlan, n_free: int, n_beside: int, target_s: Callable[[], float], attend_s: Callable[[], float]
    ) -> StepPlan:
        return plan

    def computed(self, plan: StepPlan, ended_at_s: float) -> None:
        pass


@contextmanager
def without_collecting() -> Iterator[None]:
    """Thousands of requests are alive, and none of them is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
