"""The highest rate at which a machine keeps a promise, what breaks first there, and what a change would bring: by
simulating it, never by a rule.

A promise is for so many of 100 requests: the first token in time, and every further one. The same sessions arrive at
every rate, only closer together: two rates, or two machines, differ in nothing else. The rate is doubled until the
promise is broken, and then the interval is halved, on a logarithmic scale.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from localrun.bench.arrivals import Limits, Session, Workload
from localrun.bench.metrics import goodput, percentile
from localrun.bench.results import StreamRecord
from localrun.config import latency_target_s
from localrun.errors import BadRequest
from localrun.plan.costs import Account
from localrun.plan.replica import Outcome, Setup, simulate

N_REQUESTS = 300
# The engine learns what steps cost while these are answered, and they do not count.
N_WARM = 60
# Few enough that nobody waits for another.
_N_ALONE = 24
_APART = 20.0
# Between two rates that are as good as one.
_PRECISION = 1.03
_MOST_RUNS = 24
# All come in this part of the time to a first token: closer together nothing changes.
_AT_ONCE = 100
# With fewer a percentile is one of them.
LEAST_REQUESTS = 8
# A request in eleven days.
LEAST_RATE_PER_S = 1e-6


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What happens at one rate. `users` ask again `think_s` after an answer (Little's law: rate * (think + answer));
    None where nobody knows how long they think. Rates of tokens are of each request, and of all together. `busy` is the
    share of the time in which anything is done, and `spent` says what. With `is_given_up` only `kept`, which is too low
    then, means anything. `n_failed` could not be answered, and `problem` is what the first of them was told."""

    rate_per_s: float
    users: float | None
    kept: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    each_p50_tokens_per_s: float
    each_p5_tokens_per_s: float
    tokens_per_s: float
    busy: float
    n_refused: int
    n_preempted: int
    cached_share: float
    blocked_share: float
    spent: dict[Account, float]
    prompt_tokens_per_s: float = 0.0
    is_given_up: bool = False
    n_failed: int = 0
    problem: str = ""


def point_of(outcome: Outcome, workload: Workload, rate_per_s: float, limits: Limits, n_warm: int) -> Point:
    """From the records of a run to figures."""
    counted = outcome.records[n_warm:]
    done = [record for record in counted if record.is_complete]
    tpots = [record.tpot_s for record in done if record.tpot_s] or [0.0]
    ttfts = [record.ttft_s for record in done] or [0.0]
    answer_s = statistics.mean([record.latency_s for record in done] or [0.0])
    good = goodput("", counted, 1.0, ttft_limit_s=limits.ttft_limit_s, itl_limit_s=limits.itl_limit_s)
    first_s = min((record.intended_at_s for record in counted), default=0.0)
    last_s = max((record.arrivals_s[-1] for record in done), default=first_s)
    busy_s = sum(seconds for account, seconds in outcome.spent_s.items() if account is not Account.IDLE)
    n_prompt = sum(record.n_prompt for record in done)
    problems = [record.problem for record in counted if record.problem and record.status != 429]
    return Point(
        rate_per_s=rate_per_s,
        users=None if workload.think_s is None else rate_per_s * (workload.think_s + answer_s),
        kept=good["goodput_ratio"],
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p95_s=percentile(ttfts, 95),
        itl_p50_s=percentile(tpots, 50),
        itl_p95_s=percentile(tpots, 95),
        each_p50_tokens_per_s=_inverse(percentile(tpots, 50)),
        each_p5_tokens_per_s=_inverse(percentile(tpots, 95)),
        tokens_per_s=sum(record.n_output for record in done) / max(last_s - first_s, 1e-9),
        busy=busy_s / max(outcome.seconds, 1e-9),
        n_refused=sum(record.status == 429 for record in counted),
        n_preempted=outcome.n_preempted,
        cached_share=sum(record.n_cached for record in done) / n_prompt if n_prompt else 0.0,
        blocked_share=outcome.blocked_s / max(outcome.seconds, 1e-9),
        spent={
            account: seconds / max(busy_s, 1e-9)
            for account, seconds in outcome.spent_s.items()
            if account is not Account.IDLE
        },
        prompt_tokens_per_s=n_prompt / max(last_s - first_s, 1e-9),
        is_given_up=outcome.is_given_up,
        n_failed=len(problems),
        problem=problems[0] if problems else "",
    )


def check_asked(setup: Setup, workload: Workload, sessions: Sequence[Session], rate_per_s: float, share: float) -> None:
    """Raises BadRequest for a rate at which nothing comes, and where more requests are longer than the context than
    the promise lets fail: those that are left would look as if they had the machine for themselves."""
    if not rate_per_s >= LEAST_RATE_PER_S:
        raise BadRequest(
            f"{rate_per_s:g} requests per second are too few: at least {LEAST_RATE_PER_S:g} are simulated", field="rate"
        )
    layout = setup.layout
    n_context = min(layout.n_cells, layout.n_ctx_train)
    lengths = [turn.n_prompt + turn.n_output for session in sessions for turn in session.turns]
    longer = [n_tokens for n_tokens in lengths if n_tokens > n_context]
    if len(longer) <= (1 - share) * len(lengths):
        return
    more = "a model with a longer one"
    if layout.n_cells < layout.n_ctx_train:
        more = f"more KV cells (--vary kv-cells={layout.with_cells(max(longer)).n_cells} holds all)"
    raise BadRequest(
        f"{len(longer)} of {len(lengths)} requests of '{workload.name}' are, with their answers, longer than this "
        f"model's context ({n_context} tokens): {more} or another --workload is needed",
        field="workload",
    )


def _inverse(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else 0.0


class Search:
    """Of one workload with one promise; `points` has what was found of the last machine. Raises BadRequest for a
    workload of hardly any requests, and for what `check_asked` refuses."""

    def __init__(self, workload: Workload, limits: Limits, *, seed: int = 1) -> None:
        self.workload, self.limits = workload, limits
        self.seed = seed
        self.points: list[Point] = []
        self._sessions = workload.sessions(N_REQUESTS, seed)
        n_found = sum(len(session.turns) for session in self._sessions)
        if n_found < LEAST_REQUESTS:
            raise BadRequest(
                f"{n_found} requests are too few for a forecast of '{workload.name}', and {LEAST_REQUESTS} are "
                "the least: take a longer trace, or sessions with fewer turns",
                field="workload",
            )
        self._n_warm = min(N_WARM, n_found // 4)

    def at(self, setup: Setup, rate_per_s: float, *, is_whole: bool = True) -> Point:
        """One rate; unless the run `is_whole` it ends when the promise is certain to be broken."""
        check_asked(setup, self.workload, self._sessions, rate_per_s, self.limits.share)
        promise = None if is_whole else self.limits
        outcome = simulate(setup, self._sessions, rate_per_s, seed=self.seed, promise=promise, n_warm=self._n_warm)
        return point_of(outcome, self.workload, rate_per_s, self.limits, self._n_warm)

    def carries(self, setup: Setup, near_per_s: float | None = None) -> Point:
        """The highest rate at which the promise is kept, perhaps near a known one. Raises BadRequest where a request
        alone breaks it, or so few come that all together do not."""
        self.points = []
        rate_per_s = near_per_s or 0.5 / self._alone_s(setup)
        low, high = None, None
        for _ in range(_MOST_RUNS):
            if low is not None and high is not None and high.rate_per_s <= _PRECISION * low.rate_per_s:
                break
            if rate_per_s < LEAST_RATE_PER_S:
                break
            point = self.at(setup, rate_per_s, is_whole=False)
            self.points.append(point)
            if point.kept >= self.limits.share and not point.is_given_up:
                low = point
                rate_per_s = 2 * point.rate_per_s if high is None else _between(point, high)
                if high is None and point.rate_per_s * point.ttft_p50_s > _AT_ONCE * len(self._sessions):
                    break
            else:
                high = point
                rate_per_s = point.rate_per_s / 2 if low is None else _between(low, point)
        if low is None:
            raise BadRequest(
                "the promise is kept at no rate that was tried; a longer --ttft-limit may be", field="users"
            )
        is_short = self.workload.own_rate_per_s is not None or len(self._sessions) < LEAST_REQUESTS
        if high is None and near_per_s is None and is_short:
            raise BadRequest(
                f"the promise is kept even when the {len(self._sessions)} sessions of {self.workload.name} come at "
                "once, so they do not say how many would be too many: take a longer trace, or ask for a --rate",
                field="workload",
            )
        return low

    def for_users(self, setup: Setup, users: float) -> Point:
        """What so many users see. How long answers take depends on how many there are, so it is tried twice."""
        if self.workload.think_s is None:
            raise BadRequest(f"{self.workload.name} is a trace, which has no users; ask for a --rate", field="users")
        answer_s, point = self._alone_s(setup), None
        for _ in range(3):
            rate_per_s = users / (self.workload.think_s + answer_s)
            point = self.at(setup, rate_per_s)
            assert point.users is not None
            answer_s = point.users / rate_per_s - self.workload.think_s
        assert point is not None
        return point

    def _alone_s(self, setup: Setup) -> float:
        """Seconds of a request when nobody else asks. Raises BadRequest where that breaks the promise: which limit, and
        by how much."""
        check_asked(setup, self.workload, self._sessions, LEAST_RATE_PER_S, self.limits.share)
        turns = [turn for session in self._sessions[:_N_ALONE] for turn in session.turns][:_N_ALONE]
        # One after the other: a turn comes after the end of the last, and each has more than enough time.
        alone = Session(0.0, tuple(turn._replace(think_s=_APART) for turn in turns))
        outcome = simulate(setup, [alone], 1.0, seed=self.seed)
        done = [record for record in outcome.records if record.is_complete]
        if not done:
            raise BadRequest(f"no request of {self.workload.name} is answered: {outcome.records[0].problem}")
        self._check_alone(done)
        return statistics.mean(record.latency_s for record in done)

    def _check_alone(self, done: list[StreamRecord]) -> None:
        percent, limits = 100 * self.limits.share, self.limits
        ttft_s = percentile([record.ttft_s for record in done], percent)
        itl_s = percentile([record.tpot_s or 0.0 for record in done], percent)
        for what, seconds, name, limit_s in (
            ("the first token", ttft_s, "ttft", limits.ttft_limit_s),
            ("a token", itl_s, "itl", limits.itl_limit_s),
        ):
            if seconds > limit_s:
                raise BadRequest(
                    f"not even one user gets this promise: {what} takes {seconds:.3g} s for {percent:g} of 100 "
                    f"requests that are alone, {_more(seconds / limit_s)} --{name}-limit {limit_s:g} allows",
                    field=f"{name}_limit",
                )


def _more(times: float) -> str:
    """As people say it: nobody reads percents of more than ten times."""
    return f"{times - 1:.0%} more than" if times < 10 else f"{times:.3g} times what"


def _between(low: Point, high: Point) -> float:
    return float((low.rate_per_s * high.rate_per_s) ** 0.5)


# --- what is short, and what would help: what helps most when there is twice as much of it, just beyond that rate ---

# Of the rate that is carried: so far beyond it something is certainly short.
BEYOND = 1.25
# Less more of kept promises is no help.
_LEAST_HELP = 0.02


class Change(NamedTuple):
    """In words, and the machine after it."""

    words: str
    setup: Setup


class Tried(msgspec.Struct, frozen=True):
    """A change, how many requests keep the promise with it beyond the rate that is carried now, and what the machine
    carries then, where that was simulated."""

    words: str
    kept_beyond: float
    carries: Point | None = None


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """`bottleneck` is what is short; `twice` is what the machine with twice as much of it carries. `best` is the change
    of a setting that helps most, None if none does."""

    bottleneck: str
    kept_beyond: float
    twice: Tried
    best: Tried | None
    resources: list[Tried]
    settings: list[Tried]


def resources(setup: Setup) -> dict[str, Change]:
    """Twice as much of everything that can be short."""
    layout, costs = setup.layout, setup.costs

    def costing(**factors: float) -> Setup:
        return setup._replace(costs=costs.scaled(**factors))

    return {
        "prefill": Change("a machine that computes prompts twice as fast", costing(prompts=0.5)),
        "decode bandwidth": Change("a machine that decodes twice as fast", costing(decode=0.5)),
        "host": Change("a host that is twice as fast", costing(host=0.5)),
        "slots": Change(
            "twice as many slots, each with as many cells",
            setup._replace(layout=layout.with_slots(2 * layout.slots).with_cells(2 * layout.n_cells)),
        ),
        "KV cells": Change("twice as many KV cells", setup._replace(layout=layout.with_cells(2 * layout.n_cells))),
    }


def settings(setup: Setup) -> list[Change]:
    """What a person can change without another machine."""
    layout = setup.layout
    found = [
        Change(f"--slots {n_slots}", setup._replace(layout=layout.with_slots(n_slots)))
        for n_slots in (layout.slots // 2, 2 * layout.slots)
        if 1 <= n_slots <= layout.n_batch
    ]
    found += [
        Change(f"--latency {mode}", setup._replace(target_itl_s=latency_target_s(mode)))
        for mode in ("interactive", "balanced", "throughput")
        if latency_target_s(mode) != setup.target_itl_s
    ]
    more_bytes = max(4 * setup.ram_cache_bytes, 1 << 30)
    found.append(Change(f"--ram-cache-bytes {more_bytes}", setup._replace(ram_cache_bytes=more_bytes)))
    cells = layout.with_cells(2 * layout.n_cells)
    return [*found, Change(f"--kv-cells {cells.n_cells}", setup._replace(layout=cells))]


def what_if(search: Search, setup: Setup, carried: Point) -> WhatIf:
    """About five runs for what is short, five for the settings, and two searches."""
    rate_per_s = BEYOND * carried.rate_per_s
    base = search.at(setup, rate_per_s)
    known = [(setup, base.kept)]

    def tried(change: Change) -> Tried:
        """Each machine is simulated once: more cells are a setting as well, and twice nothing is nothing."""
        kept = next((kept for machine, kept in known if machine == change.setup), None)
        if kept is None:
            kept = search.at(change.setup, rate_per_s).kept
            known.append((change.setup, kept))
        return Tried(change.words, kept)

    short = resources(setup)
    by_resource = {name: tried(change) for name, change in short.items()}
    # Of two that help alike, the one on which more time is spent; they are in that order.
    bottleneck = max(by_resource, key=lambda name: round(by_resource[name].kept_beyond, 2))
    twice = msgspec.structs.replace(
        by_resource[bottleneck], carries=search.carries(short[bottleneck].setup, rate_per_s)
    )
    changes = settings(setup)
    by_setting = [tried(change) for change in changes]
    at = max(range(len(changes)), key=lambda index: by_setting[index].kept_beyond)
    best = None
    if by_setting[at].kept_beyond >= base.kept + _LEAST_HELP:
        carries = search.carries(changes[at].setup, rate_per_s)
        if carries.rate_per_s > carried.rate_per_s:
            best = msgspec.structs.replace(by_setting[at], carries=carries)
    return WhatIf(
        bottleneck=bottleneck,
        kept_beyond=base.kept,
        twice=twice,
        best=best,
        resources=list(by_resource.values()),
        settings=by_setting,
    )


def with_costs(setup: Setup, factor: float) -> Setup:
    """The same where everything takes so many times as long."""
    return setup._replace(costs=setup.costs.scaled(prompts=factor, decode=factor, host=factor))
