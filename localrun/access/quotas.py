"""How much a key may still use now: buckets that fill up again with time, and what a door of a cluster was lent of
them. The buckets are pure; time is an argument, seconds since the epoch, so that a level that was written down means
the same after a restart.

A request is let in when a bucket of requests has one left and those of tokens are not empty. What its tokens will be
nobody knows by then, so they are taken when it ends; the level may go below zero, and the next request waits until it
is above again. So a key cannot use more than its limit in the long run, and at most what ran at once beyond it in the
short run; `n_concurrent` bounds that.

Owner: one per key, on the daemon's event loop.
Does not: keep anything (`books.py` does).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from localrun.access.keys import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, TOKENS, Key, Limit
from localrun.errors import LocalrunError, RateLimited, Unavailable

# When the next of several running requests of a key will end, nobody knows.
_BUSY_RETRY_S = 1.0
# What is lent of a bucket at once, unless more requests wait.
LENT_SHARE = 0.05
_KIND_NAMES = {
    REQUESTS: "requests", TOKENS: "tokens", PROMPT_TOKENS: "prompt tokens", OUTPUT_TOKENS: "output tokens"
}  # fmt: skip


class BucketLevel(NamedTuple):
    """How full a bucket was at a time."""

    kind: str
    per_s: float
    level: float
    at_s: float


class QuotaState(NamedTuple):
    """What is left of a limit; `reset_s` until all of it is there again."""

    limit: Limit
    remaining: int
    reset_s: float


# Of a limit: how much was lent, or is left of it.
Amount = tuple[Limit, float]


class Bucket:
    """Holds at most `limit.amount`, and gets as much in `limit.per_s` seconds."""

    __slots__ = ("at_s", "level", "limit", "per_second")

    def __init__(self, limit: Limit, now_s: float) -> None:
        self.limit = limit
        self.per_second = limit.amount / limit.per_s
        self.level = float(limit.amount)
        self.at_s = now_s

    def fill(self, now_s: float) -> float:
        """The level now. A clock that was set back fills nothing."""
        if now_s > self.at_s:
            self.level = min(float(self.limit.amount), self.level + (now_s - self.at_s) * self.per_second)
        self.at_s = now_s
        return self.level

    def wait_s(self, now_s: float) -> float:
        """Seconds until there is one left; 0 if there is."""
        return max(0.0, (1.0 - self.fill(now_s)) / self.per_second)

    def take(self, amount: int) -> None:
        self.level -= amount


def _buckets(key: Key, now_s: float, kept: Iterable[BucketLevel]) -> list[Bucket]:
    made = [Bucket(limit, now_s) for limit in dict.fromkeys(key.limits)]
    found = {(level.kind, level.per_s): level for level in kept}
    for bucket in made:
        level = found.get((bucket.limit.kind, bucket.limit.per_s))
        if level is not None:
            bucket.level = min(level.level, float(bucket.limit.amount))
            bucket.at_s = min(level.at_s, now_s)
    return made


def _used(n_prompt: int, n_output: int) -> dict[str, int]:
    return {TOKENS: n_prompt + n_output, PROMPT_TOKENS: n_prompt, OUTPUT_TOKENS: n_output}


class Quota:
    """See the module. `kept` are levels that were written down."""

    def __init__(self, key: Key, now_s: float, kept: Iterable[BucketLevel] = ()) -> None:
        self.n_running = 0
        self._key = key
        self._buckets = _buckets(key, now_s, kept)

    def follow(self, key: Key, now_s: float) -> None:
        """The key has other rules now, and with other limits the levels of those of the same kind and time."""
        if key.limits != self._key.limits:
            self._buckets = _buckets(key, now_s, self.levels())
        self._key = key

    def admit(self, now_s: float) -> None:
        """Takes one request. Raises RateLimited, and takes nothing."""
        self._check(now_s)
        self.n_running += 1
        for bucket in self._buckets:
            if bucket.limit.kind == REQUESTS:
                bucket.take(1)

    def _check(self, now_s: float) -> None:
        key = self._key
        if key.n_concurrent and self.n_running >= key.n_concurrent:
            raise RateLimited(
                f"the key {key.name!r} has {self.n_running} requests running, and may have {key.n_concurrent} at once; "
                f"try again when one of them has ended",
                retry_after_s=_BUSY_RETRY_S,
            )
        worst, wait_s = None, 0.0
        for bucket in self._buckets:
            bucket_wait_s = bucket.wait_s(now_s)
            if bucket_wait_s > wait_s:
                worst, wait_s = bucket, bucket_wait_s
        if worst is not None:
            limit = worst.limit
            raise RateLimited(
                f"the key {key.name!r} has used its {_KIND_NAMES[limit.kind]}, {limit.text}; try again in "
                f"{math.ceil(wait_s)} s",
                retry_after_s=wait_s,
                kind=limit.kind,
            )

    def lend(self, n_wanted: int, now_s: float) -> tuple[int, list[Amount]]:
        """Takes up to so many requests, and tokens to go with them, for somebody else to give out (`Leased`): a
        small share of each bucket, or as much as the requests need. Returns how many may run, which count as running
        from now on. Raises RateLimited, and takes nothing."""
        self._check(now_s)
        n = min(n_wanted, self._key.n_concurrent - self.n_running) if self._key.n_concurrent else n_wanted
        amounts = []
        for bucket in self._buckets:
            amount = max(1.0, math.floor(LENT_SHARE * bucket.limit.amount))
            if bucket.limit.kind == REQUESTS:
                amount = min(math.floor(bucket.level), max(amount, n))
            amount = min(bucket.level, amount)
            bucket.level -= amount
            amounts.append((bucket.limit, amount))
        self.n_running += n
        return n, amounts

    def settle(self, amounts: Iterable[Amount], now_s: float) -> None:
        """Takes back what is left of what was lent; below zero, what was used beyond it."""
        left = dict(amounts)
        for bucket in self._buckets:
            level = bucket.fill(now_s) + left.get(bucket.limit, 0.0)
            bucket.level = min(float(bucket.limit.amount), level)

    def leave(self) -> None:
        """A request that was let in is over."""
        self.n_running -= 1

    def give_back(self, now_s: float) -> None:
        """A request that was let in is to count no more."""
        for bucket in self._buckets:
            if bucket.limit.kind == REQUESTS:
                bucket.fill(now_s)
                bucket.level = min(float(bucket.limit.amount), bucket.level + 1)

    def use(self, n_prompt: int, n_output: int, now_s: float) -> None:
        """Takes the tokens of an answer that has ended."""
        amounts = _used(n_prompt, n_output)
        for bucket in self._buckets:
            if bucket.limit.kind in amounts:
                bucket.fill(now_s)
                bucket.take(amounts[bucket.limit.kind])

    def levels(self) -> list[BucketLevel]:
        """To be written down."""
        return [
            BucketLevel(bucket.limit.kind, bucket.limit.per_s, bucket.level, bucket.at_s) for bucket in self._buckets
        ]

    def standings(self, now_s: float) -> dict[str, QuotaState]:
        """Of each kind that is limited, the limit of which the smallest part is left."""
        found: dict[str, tuple[float, QuotaState]] = {}
        for bucket in self._buckets:
            limit, level = bucket.limit, bucket.fill(now_s)
            share = level / limit.amount
            if limit.kind not in found or share < found[limit.kind][0]:
                reset_s = (limit.amount - level) / bucket.per_second
                found[limit.kind] = share, QuotaState(limit, max(0, math.floor(level)), reset_s)
        return {kind: standing for kind, (_, standing) in found.items()}


# --- what a door of a cluster gives out of a key's quota, which the cluster's head has: small parts, lent ---
#
# The head takes what it lends from the key's buckets at once, so that doors together never give out more than there
# is. What is left of a lease goes back with the next question, or when it ends; what answers used beyond it is told at
# once. Where it is not known whether the head has heard that something was given back, it counts as used. So a loss of
# either side makes a key wait a little for what nobody used, and never gives it anything twice. How many requests run
# is told as a number, not as a change, for the same reason.
#
# So requests never go beyond a limit. Tokens do, as on one machine, since nobody knows those of an answer before its
# end: by those of the answers that run at once when there is less than one left, at each door, since one that still
# holds a part lets requests in when the others do not any more. What a door owes when it is killed is forgiven.

LEASE_S = 5.0


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag="asked"):
    """A door gives back `left` and asks for `n_wanted` requests more than the `n_running` that it has."""

    key_id: str
    left: list[Amount]
    n_running: int
    n_wanted: int


class Lent(msgspec.Struct, frozen=True, kw_only=True, tag="lent"):
    """Room for `n` requests and amounts of each limit, or the reason why not. `standings` are the head's."""

    n: int = 0
    amounts: list[Amount] = []
    standings: list[QuotaState] = []
    refusal: str = ""
    retry_after_s: float = 1.0
    kind: str = REQUESTS


class Head(Protocol):
    """Who lends. `lend` raises Unavailable when no answer came; it may have been heard then."""

    @property
    def is_there(self) -> bool: ...
    async def lend(self, asked: Asked) -> Lent: ...


class Leased:
    """A `Quota` at a door. `ready` comes before `admit`, and `release` where that does not follow."""

    def __init__(self, key: Key, head: Head) -> None:
        self.n_running = 0
        self._key, self._head = key, head
        self._n_promised = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._n_free = 0  # of requests at once, of those lent
        self._limits = key.limits  # as the head has them, which may know of a change first
        self._left: dict[Limit, float] = {}
        self._ends_at_s = -math.inf  # of the monotonic clock
        self._standings: list[QuotaState] = []
        self._refusal: Lent | None = None
        self._asking: asyncio.Task[None] | None = None
        self._has_news = False

    def follow(self, key: Key, now_s: float) -> None:
        if key.limits != self._key.limits:
            self._limits = key.limits
        self._key = key

    @property
    def held(self) -> int:
        """Requests that run, or are about to."""
        return self.n_running + self._n_promised

    # --- a request's way -----------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """Waits until a request may begin, and keeps it a place; False where none has to be kept, or it may not begin,
        and `admit` says why."""
        if not self._is_limited:
            return False
        if not self._waiting and self._promise():
            return True
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._ask()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.result():
                self.release(time.time())
            raise

    def admit(self, now_s: float) -> None:
        """See `Quota`. Raises Unavailable where the head would have to be asked, and is not there."""
        if self._is_limited and not self._n_promised:
            raise self._error()
        self._n_promised = max(0, self._n_promised - 1)
        self.n_running += 1

    def release(self, now_s: float) -> None:
        """A place that was kept is not needed."""
        if self._n_promised:
            self._n_promised -= 1
            self.give_back(now_s)
            self._freed()

    def leave(self) -> None:
        self.n_running -= 1
        self._freed()

    def give_back(self, now_s: float) -> None:
        self._count({REQUESTS: -1})

    def use(self, n_prompt: int, n_output: int, now_s: float) -> None:
        self._count(_used(n_prompt, n_output))
        if any(left < 0 for left in self._left.values()):
            self.tell()

    def levels(self) -> list[BucketLevel]:
        """The head writes them down."""
        return []

    def standings(self, now_s: float) -> dict[str, QuotaState]:
        """Of each kind that is limited, what is left at the head and here, as far as it is known."""
        found: dict[str, QuotaState] = {}
        for limit, remaining, reset_s in self._standings:
            here = math.floor(self._left.get(limit, 0.0))
            found[limit.kind] = QuotaState(limit, min(limit.amount, max(0, remaining + here)), reset_s)
        return found

    # --- the lease -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Now and then: what is left of a lease that has ended goes back."""
        if time.monotonic() >= self._ends_at_s and (self._n_free or any(self._left.values())):
            self.tell()

    def tell(self) -> None:
        """Something has changed that the head is to know."""
        if self._asking is not None:
            self._has_news = True
        elif self._head.is_there:
            self._ask()

    @property
    def _is_limited(self) -> bool:
        return bool(self._key.limits or self._key.n_concurrent)

    def _promise(self) -> bool:
        has_ended = time.monotonic() >= self._ends_at_s
        if has_ended or (self._key.n_concurrent and not self._n_free):
            return False
        if any(self._left.get(limit, 0.0) < 1 for limit in self._limits):
            return False
        self._n_free -= bool(self._key.n_concurrent)
        self._count({REQUESTS: 1})
        self._n_promised += 1
        return True

    def _count(self, used: dict[str, int]) -> None:
        for limit in set(self._limits):
            if limit.kind in used:
                self._left[limit] = self._left.get(limit, 0.0) - used[limit.kind]

    def _freed(self) -> None:
        if self._key.n_concurrent:
            self._n_free += 1
            self.tell()

    def _ask(self) -> None:
        """One question at a time, since each says how everything is."""
        if self._asking is None:
            self._has_news = False
            self._asking = asyncio.create_task(self._exchange())
            self._asking.add_done_callback(self._asked)

    def _asked(self, _: asyncio.Task[None]) -> None:
        self._asking = None
        if self._waiting:
            self._ask()
        elif self._has_news:
            self.tell()

    async def _exchange(self) -> None:
        n_waiting = len(self._waiting)
        lent = await self._renewed(n_waiting) if self._head.is_there else None
        if n_waiting:
            self._refusal = lent
        was_for_some = False
        for place in list(self._waiting):
            has_place = not place.done() and self._promise()
            was_for_some |= has_place
            # Those who came while the question was under way, or whom a part of it was for, ask again.
            if not (place.done() or has_place) and (n_waiting <= 0 or was_for_some):
                break
            self._waiting.popleft()
            n_waiting -= 1
            if not place.done():
                place.set_result(has_place)
        self._has_news |= self._n_free > 0  # it was for somebody who has gone

    async def _renewed(self, n_wanted: int) -> Lent | None:
        """A new lease for what is left of the one before; None when no answer came."""
        left = [one for one in self._left.items() if one[1]]
        asked = Asked(key_id=self._key.id, left=left, n_running=self.held, n_wanted=n_wanted)
        self._left, self._n_free = {}, 0
        now_s = time.monotonic()
        try:
            lent = await self._head.lend(asked)
        except Unavailable:
            self._add([(limit, amount) for limit, amount in left if amount < 0])
            return None
        self._ends_at_s = now_s + LEASE_S
        self._standings = lent.standings
        self._n_free = lent.n if self._key.n_concurrent else 0
        if lent.n:
            self._limits = tuple(limit for limit, _ in lent.amounts)
        self._add(lent.amounts)
        return lent

    def _add(self, amounts: list[Amount]) -> None:
        for limit, amount in amounts:
            self._left[limit] = self._left.get(limit, 0.0) + amount

    def _error(self) -> LocalrunError:
        why = self._refusal
        if why is not None and why.refusal:
            return RateLimited(why.refusal, retry_after_s=why.retry_after_s, kind=why.kind)
        return Unavailable(
            f"the head of the cluster does not answer, and only it knows whether the key {self._key.name!r} may begin "
            f"another request; try again",
            retry_after_s=LEASE_S,
        )
