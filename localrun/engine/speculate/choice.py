"""How many drafted tokens of each stream are worth their rows in the next step. Pure.

A step with drafts takes longer (`costs.py`) and gives more tokens: one for each stream, and each drafted token that
turns out right, as long as those before it did. Of all ways to fill the step, the one is taken that gives the most
tokens per second. If that is not at least `LEAST_GAIN` of what the step gives without drafts, there are none.

Kernels are quickest with certain numbers of rows, so steps have these numbers, filled up with rows that nobody needs.
Where sequences have streams of cells of their own (`is_even`), or states, the library computes only equal numbers of
rows together: then all streams get the same number, or those with drafts are computed in a second pass.

Does not: know tokens, or requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from localrun.engine.schedule.budget import TILE_ROWS
from localrun.engine.speculate.costs import RowCosts

LEAST_GAIN = 1.05
# Nobody's tokens may come this many times as far apart because others have drafts, however much these gain.
MOST_SLOWDOWN = 1.5
# Nor may the step of a stream that is alone take this many times as long as a token may, however many it gives: a
# prompt that comes meanwhile waits for its end, and text in bursts is hard to read along. Beside others: once as long.
MOST_TARGETS = 4
# Rows of all streams together, in one pool, and of a stream that is alone. Each size has to be tried before its cost is
# known, so there are only as many as there is something to gain by.
SIZES = (2, 4, 8, 12, 16, 24, 32, TILE_ROWS)
SIZES_ALONE = (2, 4, 8, 16, TILE_ROWS)
# Drafted tokens of each stream, where all have the same number, and where those with drafts have a pass of their own.
EVEN_DRAFTS = (1, 3, 7, 15)
OWN_DRAFTS = (1, 2, 4, 8)
# More than this many drafted tokens of one stream are not verified at once.
MOST_DRAFTS = TILE_ROWS - 1


@dataclass(frozen=True)
class DraftStream:
    """One request that decodes, in order of sequence. `chances[j]` is the chance that its drafted token j is right if
    those before it are. `is_drawn`: its drafts have yet to be computed, which takes time for each token."""

    seq: int
    chances: Sequence[float]
    is_drawn: bool = False


@dataclass(frozen=True)
class DraftChoice:
    """Rows of each stream beside its own one, drafted or filled up. `ratio` is how many times as long as the step
    without them it takes, and `n_tokens` how many tokens it is expected to give."""

    n_rows: tuple[int, ...]
    ratio: float
    n_tokens: float

    @property
    def gain(self) -> float:
        """Tokens per second over those without drafts."""
        return self.n_tokens / len(self.n_rows) / self.ratio


@dataclass(frozen=True)
class DraftLimits:
    """`most_each` rows more of a stream and `most_rows` in all; a stream should have a token every `target_s` seconds
    (0: no limit). With `is_even` only equal numbers of rows are computed together, and unless there `may_be_uneven`
    others are not to be. A drafted token that has to be computed takes `draft_s`."""

    most_each: int
    most_rows: int
    target_s: float
    is_even: bool
    draft_s: float = 0.0
    may_be_uneven: bool = True


def _more_rows(n_streams: int, *, is_even: bool) -> tuple[int, ...]:
    """Numbers of rows beside the streams' own that a step can have; of those with a second pass only the first."""
    if is_even and n_streams > 1:
        return (1, *(n_streams * n_each for n_each in EVEN_DRAFTS))
    return tuple(size - n_streams for size in _sizes(n_streams) if size > n_streams)


def _sizes(n_streams: int) -> tuple[int, ...]:
    return SIZES_ALONE if n_streams == 1 else SIZES


def may_pay(n_streams: int, expected_accepted: float, costs: RowCosts, *, is_even: bool) -> bool:
    """Whether drafts that are expected to give `expected_accepted` tokens, at most, could be worth their rows: most
    steps are done with the question here."""
    least = LEAST_GAIN * n_streams
    return any(
        n_streams + min(expected_accepted, n_more) >= least * costs.ratio(n_streams + n_more, n_streams)
        for n_more in _more_rows(n_streams, is_even=is_even)
    )


def choose(streams: Sequence[DraftStream], costs: RowCosts, limits: DraftLimits) -> DraftChoice | None:
    """The best way to fill the step; None if it is best without drafts, or if what that takes is not known yet."""
    if not costs.is_known(len(streams)) or costs.is_stale(len(streams)):
        return None
    gains = [expected_gains(stream.chances[: limits.most_each]) for stream in streams]
    if not any(gains):
        return None
    if limits.is_even and len(streams) > 1:
        ways = [*_even(gains, limits), *(_in_second_pass(gains, limits) if limits.may_be_uneven else [])]
    else:
        ways = _in_one_pool(gains, limits)
    best = max((_judged(way, streams, gains, costs, limits) for way in ways), key=_gain, default=None)
    return best if best is not None and best.gain >= LEAST_GAIN else None


def _gain(choice: DraftChoice) -> float:
    return choice.gain


def expected_gains(chances: Sequence[float]) -> list[float]:
    """The chance that each drafted token becomes part of the answer."""
    gains, product = [], 1.0
    for chance in chances:
        product *= chance
        gains.append(product)
    return gains


def _in_one_pool(gains: list[list[float]], limits: DraftLimits) -> list[tuple[int, ...]]:
    """Rows in the order of what they gain, up to each size; the last stream that has drafts is filled up."""
    by_gain = sorted(
        ((-gain, index) for index, own in enumerate(gains) for gain in own),
    )
    ways = []
    for size in _sizes(len(gains)):
        n_more = min(size - len(gains), limits.most_rows)
        if n_more <= 0:
            continue
        n_rows = [0] * len(gains)
        for _, index in by_gain[:n_more]:
            n_rows[index] += 1
        n_left = n_more - sum(n_rows)
        for index in range(len(gains)):
            more = min(n_left, limits.most_each - n_rows[index]) if n_rows[index] else 0
            n_rows[index] += more
            n_left -= more
        if (
            size < TILE_ROWS or len(gains) + sum(n_rows) >= TILE_ROWS
        ):  # a tile that is cut short is dearer than a whole one
            ways.append(tuple(n_rows))
        if n_more >= len(by_gain):
            break
    return ways


def _even(gains: list[list[float]], limits: DraftLimits) -> list[tuple[int, ...]]:
    most = min(limits.most_each, limits.most_rows // len(gains))
    return [(n_each,) * len(gains) for n_each in EVEN_DRAFTS if n_each <= most]


def _in_second_pass(gains: list[list[float]], limits: DraftLimits) -> list[tuple[int, ...]]:
    n_drafting = sum(bool(own) for own in gains)
    if n_drafting == len(gains):
        return []
    most = min(limits.most_each, limits.most_rows // n_drafting)
    return [tuple(n_each if own else 0 for own in gains) for n_each in OWN_DRAFTS if n_each <= most]


def _judged(
    way: tuple[int, ...], streams: Sequence[DraftStream], gains: list[list[float]], costs: RowCosts, limits: DraftLimits
) -> DraftChoice:
    n_streams = len(way)
    if is_one_pass(way, is_even=limits.is_even):
        ratio = costs.ratio(n_streams + sum(way), n_streams)
    else:
        ratio = 1.0 + sum(costs.ratio(n_rows, n_streams) for n_rows in passes(way, streams))
    plain_s = costs.seconds(n_streams)
    n_drawn = max((n for n, stream in zip(way, streams, strict=True) if stream.is_drawn), default=0)
    if n_drawn and plain_s:
        ratio += n_drawn * limits.draft_s / plain_s
    expected = [1 + sum(own[:n_rows]) for own, n_rows in zip(gains, way, strict=True)]
    slowdown = ratio / min(expected)
    token_s = max(limits.target_s, plain_s) if limits.target_s else math.inf
    most_s = MOST_TARGETS * token_s if n_streams == 1 else max(token_s, MOST_SLOWDOWN * plain_s)
    if slowdown > MOST_SLOWDOWN or plain_s * slowdown > token_s or plain_s * ratio > most_s:
        return DraftChoice(way, ratio, 0.0)
    return DraftChoice(way, ratio, sum(expected))


class DraftPolicy(NamedTuple):
    """The two questions of a step with drafts, the quick one and the whole one. Tests have others."""

    may_pay: Callable[..., bool]
    choose: Callable[[Sequence[DraftStream], RowCosts, DraftLimits], DraftChoice | None]


BY_COST = DraftPolicy(may_pay, choose)


def is_one_pass(way: Sequence[int], *, is_even: bool) -> bool:
    """Whether the library computes so many rows of each stream, beside its own one, together."""
    return not is_even or min(way) == max(way)


def passes(way: Sequence[int], streams: Sequence[DraftStream]) -> list[int]:
    """Rows of each pass after the first one: neighbouring streams that have more rows are computed together."""
    state = [(index, stream.seq) for index, stream in enumerate(streams) if way[index]]
    runs = groupby(enumerate(state), key=lambda found: found[1][1] - found[0])
    return [sum(way[index] for _, (index, _) in run) for _, run in runs]
