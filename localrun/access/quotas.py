"""How much a key may still use now: buckets that fill up again with time. Pure; time is an argument, seconds since the
epoch, so that a level that was written down means the same after a restart.

A request is let in when a bucket of requests has one left and those of tokens are not empty. What its tokens will be
nobody knows by then, so they are taken when it ends; the level may go below zero, and the next request waits until it
is above again. So a key cannot use more than its limit in the long run, and at most what ran at once beyond it in the
short run; `n_concurrent` bounds that.

Owner: one per key, on the daemon's event loop.
Does not: keep anything (`usage.py` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from localrun.access.keys import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, TOKENS, Key, Limit
from localrun.errors import RateLimited

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
        """Takes up to so many requests, and tokens to go with them, for somebody else to give out (`leases.py`): a
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
        amounts = {TOKENS: n_prompt + n_output, PROMPT_TOKENS: n_prompt, OUTPUT_TOKENS: n_output}
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
