"""Leases of quotas: doors and a head in one event loop, with answers that are lost on the way, and a clock by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.access import quotas
from localrun.access.keys import OUTPUT_TOKENS, REQUESTS, TOKENS, Key, Limit
from localrun.access.quotas import LEASE_S, Asked, Leased, Lent, Quota
from localrun.errors import LocalrunError, RateLimited, Unavailable
from tests.access.test_quotas import key

DAY_S = 86400.0


class Clock:
    """Of doors; the head's stands still, so that nothing fills up again."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


class FakeHead:
    """The head's side of a lease. `how` is what happens to questions: heard, lost before it, lost after it, or not put
    since the door knows that nobody is there."""

    def __init__(self, key: Key) -> None:
        self.quota = Quota(key, 0.0)
        self.how = "heard"
        self.n_asked = 0
        self._running: dict[int, int] = {}

    def at(self, door: int) -> Any:
        head = self

        class At:
            @property
            def is_there(self) -> bool:
                return head.how != "away"

            async def lend(self, asked: Asked) -> Lent:
                return await head.lend(door, asked)

        return At()

    async def lend(self, door: int, asked: Asked) -> Lent:
        self.n_asked += 1
        await asyncio.sleep(0)
        if self.how == "unheard":
            raise Unavailable("lost")
        self.quota.n_running += asked.n_running - self._running.get(door, 0)
        self._running[door] = asked.n_running
        self.quota.settle(asked.left, 0.0)
        lent = Lent()
        if asked.n_wanted:
            try:
                n, amounts = self.quota.lend(asked.n_wanted, 0.0)
                self._running[door] += n
                lent = Lent(n=n, amounts=amounts, standings=list(self.quota.standings(0.0).values()))
            except RateLimited as error:
                lent = Lent(refusal=error.message, retry_after_s=error.retry_after_s, kind=error.kind)
        if self.how == "unanswered":
            raise Unavailable("lost")
        return lent


class Doors:
    def __init__(self, key: Key, n: int = 2) -> None:
        self.head = FakeHead(key)
        self.doors = [Leased(key, self.head.at(door)) for door in range(n)]

    async def begin(self, door: int) -> None:
        await self.doors[door].ready()
        self.doors[door].admit(0.0)

    async def ask(self, door: int, n_tokens: int = 0) -> bool:
        """A whole request. False where it is refused."""
        try:
            await self.begin(door)
        except LocalrunError:
            return False
        self.doors[door].leave()
        self.doors[door].use(0, n_tokens, 0.0)
        await self.quiet()
        return True

    async def quiet(self) -> None:
        """Until nothing is on the way."""
        while any(door._asking is not None for door in self.doors):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)

    def left(self, limit: Limit) -> float:
        """Of the limit: at the head, and lent."""
        at_head = sum(bucket.level for bucket in self.head.quota._buckets if bucket.limit == limit)
        return at_head + sum(door._left.get(limit, 0.0) for door in self.doors)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(quotas, "time", clock)
    return clock


@pytest.mark.usefixtures("clock")
async def test_doors_together_let_in_as_many_requests_as_the_limit_and_no_more() -> None:
    doors = Doors(key(Limit(REQUESTS, 100, DAY_S)))
    let_in = [await doors.ask(n % 2) for n in range(130)]
    assert sum(let_in) == 100
    with pytest.raises(RateLimited, match="has used its requests, 100/day; try again in") as refused:
        await doors.begin(0)
    assert (refused.value.kind, refused.value.retry_after_s) == (REQUESTS, pytest.approx(DAY_S / 100))


async def test_what_one_door_does_not_use_is_the_others_when_the_lease_ends(clock: Clock) -> None:
    doors = Doors(key(Limit(REQUESTS, 100, DAY_S)))
    await doors.ask(0)
    assert sum([await doors.ask(1) for _ in range(110)]) == 95
    clock.now_s += LEASE_S
    doors.doors[0].tick()
    await doors.quiet()
    assert sum([await doors.ask(1) for _ in range(10)]) == 4


@pytest.mark.usefixtures("clock")
async def test_a_limit_that_is_used_up_takes_nothing_from_the_others() -> None:
    limits = Limit(REQUESTS, 100, DAY_S), Limit(TOKENS, 50, DAY_S)
    doors = Doors(key(*limits))
    assert [await doors.ask(n % 2, 60) for n in range(20)] == [True, *[False] * 19]
    assert doors.left(limits[0]) == 99


@pytest.mark.usefixtures("clock")
async def test_many_at_once_need_few_questions() -> None:
    doors = Doors(key(Limit(REQUESTS, 1000, DAY_S)), n=1)
    await asyncio.gather(*(doors.begin(0) for _ in range(400)))
    assert doors.head.n_asked <= 2
    assert doors.left(Limit(REQUESTS, 1000, DAY_S)) == 600


@pytest.mark.usefixtures("clock")
async def test_as_many_run_at_once_as_may_over_all_doors() -> None:
    doors = Doors(key(n_concurrent=3))
    await doors.begin(0)
    await doors.begin(1)
    await doors.begin(1)
    for door in (0, 1):
        with pytest.raises(RateLimited, match="3 requests running"):
            await doors.begin(door)
    doors.doors[1].leave()
    await doors.quiet()
    await doors.begin(0)
    with pytest.raises(RateLimited):
        await doors.begin(1)
    assert doors.head.quota.n_running == 3


@pytest.mark.usefixtures("clock")
async def test_a_place_that_is_not_used_is_free_again() -> None:
    doors = Doors(key(Limit(REQUESTS, 100, DAY_S), n_concurrent=1))
    assert await doors.doors[0].ready()
    doors.doors[0].release(0.0)
    await doors.quiet()
    waiting = asyncio.create_task(doors.doors[0].ready())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await doors.quiet()
    await doors.begin(1)
    assert doors.left(Limit(REQUESTS, 100, DAY_S)) == 99


async def test_without_the_head_a_door_goes_on_with_its_lease_and_then_says_so(clock: Clock) -> None:
    doors = Doors(key(Limit(REQUESTS, 100, DAY_S), Limit(TOKENS, 1000, DAY_S)))
    await doors.ask(0, 10)
    doors.head.how = "away"
    assert [await doors.ask(0, 10) for _ in range(5)] == [True] * 4 + [False]
    with pytest.raises(Unavailable, match="head of the cluster does not answer") as away:
        await doors.begin(0)
    assert away.value.retry_after_s
    doors.head.how = "heard"
    assert await doors.ask(0, 10)
    doors.head.how = "away"
    clock.now_s += LEASE_S
    assert not await doors.ask(0)  # there were four left
    doors.head.how = "heard"
    doors.doors[0].tick()
    await doors.quiet()
    assert [doors.left(limit) for limit in doors.head.quota._key.limits] == [94, 940]


@pytest.mark.usefixtures("clock")
async def test_what_is_left_counts_what_is_lent_here() -> None:
    limit = Limit(REQUESTS, 100, DAY_S)
    doors = Doors(key(limit))
    await doors.ask(0)
    assert doors.doors[0].standings(0.0)[REQUESTS].remaining == 99
    assert doors.doors[1].standings(0.0) == {}


ACTION = st.tuples(
    st.sampled_from(("ask", "ask", "ask", "late", "heard", "unheard", "unanswered", "away", "killed")),
    st.integers(0, 1),
    st.integers(0, 40),
)


def run(work: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
    clock, before = Clock(), quotas.time
    quotas.time = clock  # type: ignore[assignment]
    try:
        asyncio.run(work(clock))
    finally:
        quotas.time = before


@settings(max_examples=150)
@given(st.lists(ACTION, max_size=60))
def test_whatever_is_lost_nothing_is_given_twice(actions: list[tuple[str, int, int]]) -> None:
    limits = Limit(REQUESTS, 30, DAY_S), Limit(TOKENS, 200, DAY_S), Limit(OUTPUT_TOKENS, 300, DAY_S)

    async def work(clock: Clock) -> None:
        doors = Doors(key(*limits))
        n_requests = n_tokens = n_forgiven = 0
        for what, door, amount in actions:
            if what == "ask":
                n_let_in = await doors.ask(door, amount)
                n_requests += n_let_in
                n_tokens += n_let_in * amount
            elif what == "late":
                clock.now_s += LEASE_S
                doors.doors[door].tick()
                await doors.quiet()
            elif what == "killed":
                owed = doors.doors[door]._left.get(limits[1], 0.0)
                n_forgiven += max(0, round(-owed))
                doors.doors[door] = Leased(doors.head.quota._key, doors.head.at(door))
            else:
                doors.head.how = what
            assert n_requests <= 30
            assert doors.left(limits[0]) <= 30 - n_requests
            assert doors.left(limits[1]) <= 200 - n_tokens + n_forgiven
            assert n_tokens <= 200 + 2 * 40 + n_forgiven

    run(work)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_never_do_more_run_at_once(actions: list[tuple[int, bool]]) -> None:
    async def work(clock: Clock) -> None:
        doors = Doors(key(Limit(REQUESTS, 1000, DAY_S), n_concurrent=3), n=3)
        n_running = [0, 0, 0]
        for door, is_end in actions:
            if is_end and n_running[door]:
                doors.doors[door].leave()
                n_running[door] -= 1
            elif not is_end:
                try:
                    await doors.begin(door)
                    n_running[door] += 1
                except RateLimited:
                    assert sum(n_running) == 3
            await doors.quiet()
            assert sum(n_running) == doors.head.quota.n_running <= 3

    run(work)
