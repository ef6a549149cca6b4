"""How many drafted tokens of each stream are worth their rows in the next step, by what steps cost. Pure.

A step with drafts takes longer (`RowCosts`) and gives more tokens: one for each stream, and each drafted token that
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

# Before anything is known, n rows are expected to take n ** _PRIOR_SLOPE times as long as one. (Measured with 135M on
# two cores: 0.52 for Q4_0, 0.73 for Q4_1. A GPU is nearer to 0, Metal to 1.)
_PRIOR_SLOPE = 0.6
# Steps further apart than this were not computed by the same machine, so to speak.
_NEAR_S = 1.0
# The weight of the latest of many measurements. Of the first few the average counts.
_LEAST_WEIGHT = 1 / 16
# A single measurement may be this far from what was expected; beyond is a step that something else held up.
_MOST_ERROR = math.log(2.0)
_MOST_HELD_UP = 2  # steps in a row
_FEW = 3  # measurements
# A size that was not measured for so many steps is taken for a tenth cheaper, for three times as many for two tenths,
# then seven times, and so on: a size that is far too dear is hardly ever tried, one that nearly pays now and then.
_HOPE_STEPS, _HOPE, _MOST_HOPE = 32, 0.1, 0.8
# The same of a size whose only step was held up. Where the others disappoint, they take up to so many times as long.
_DOUBTFUL_HOPE_STEPS, _MOST_PATIENCE = 2, 16
# What steps without drafts take is measured again when those with drafts have taken so many times as long since: depth
# makes them unequally dearer. Where it was as expected, it is trusted for twice as long, and so on.
_STALE_STEPS, _MOST_TRUST, _AS_EXPECTED = 32, 8, 0.15
_SHALLOW_TOKENS = 256
_LATEST = 0.2  # weight of the latest plain step in what one takes


class RowCosts:
    """What a step costs by its rows: a table of ratios. Learns from `observe`, answers `ratio` and `seconds`.

    No curve would do. Kernels take rows in fours, in eights or in tiles, so 5 rows may take longer than 8, and where
    reading the weights is all the work 8 rows take hardly longer than one. Only ratios are learned, and only from steps
    that follow each other: a machine whose speed changes from minute to minute changes both alike. What was not
    measured for a while is believed to have become cheaper, little by little, so that it is tried again (`_HOPE`).

    `has_tiles`: 64 rows and more are those of one stream, or of a pool, so that a kernel takes them as tiles."""

    def __init__(self, *, has_tiles: bool = True) -> None:
        self._has_tiles = has_tiles
        self._logs: dict[int, float] = {}
        self._n_seen: dict[int, int] = {}
        self._n_steps = 0
        self._measured_at: dict[int, int] = {}
        self._patience: dict[int, int] = {}
        self._last: tuple[int, float, float] | None = None  # rows, seconds, and when it ended
        self._n_held_up = 0
        self._row_s = 0.0  # of a step, over its ratio to a step of one row
        self._all_s = 0.0  # of all steps
        self._measured_at_s: dict[int, float] = {}  # of those
        self._trust: dict[int, int] = {}

    def observe(self, n_rows: int, seconds: float, ended_at_s: float) -> None:
        """A step of so many rows, computed in one pass, took so long."""
        seconds = max(seconds, 1e-9)
        hope = self._hope(n_rows)
        self._n_steps += 1
        self._measured_at[n_rows] = self._n_steps
        last = self._last
        if last is not None and ended_at_s - seconds - last[2] >= _NEAR_S:
            last = None
        is_held_up = False
        if n_rows not in self._logs and (last is None or not self._logs):
            # The others are measured by the first one, which is not for any of them to change.
            self._logs[n_rows], self._n_seen[n_rows] = self._log(n_rows), 0 if self._logs else _FEW
        elif last is not None:
            error = math.log(seconds / last[1]) - (self._log(n_rows) - self._log(last[0]))
            is_held_up = error > _MOST_ERROR and self._n_held_up < _MOST_HELD_UP
            if last[0] != n_rows:
                if self.is_stale(n_rows):
                    is_right = abs(error) <= _AS_EXPECTED
                    self._trust[n_rows] = min(_MOST_TRUST, 2 * self._trust.get(n_rows, 1)) if is_right else 1
                self._correct(n_rows, last[0], error)
                if hope >= _HOPE:
                    was_right = error < -hope / 2
                    self._patience[n_rows] = 1 if was_right else min(_MOST_PATIENCE, 2 * self._patience.get(n_rows, 1))
        # Nothing is measured by a step that something held up. If the next ones take as long, that is what steps take.
        self._n_held_up = self._n_held_up + 1 if is_held_up else 0
        if not is_held_up:
            self._last = n_rows, seconds, ended_at_s
        self._all_s += seconds
        self._measured_at_s[n_rows] = self._all_s
        row_s = seconds / math.exp(self._log(n_rows))
        self._row_s = self._row_s + _LATEST * (row_s - self._row_s) if self._row_s else row_s

    def heir(self, more_s: float = 0.0) -> RowCosts:
        """A table that begins with what this one knows, all of it seen once but the fewest rows. There each row takes
        `more_s` longer."""
        heir = RowCosts(has_tiles=self._has_tiles)
        heir._row_s = self._row_s + more_s if self._row_s else 0.0
        heir._logs = dict(self._logs)
        if heir._row_s:
            heir._logs = {n: math.log((self.seconds(n) + n * more_s) / heir._row_s) for n in self._logs}
        heir._n_seen = {n_rows: min(n_seen, 1) for n_rows, n_seen in self._n_seen.items()}
        heir._n_seen |= dict.fromkeys([min(self._logs)] if self._logs else [], _FEW)
        heir._measured_at, heir._patience = dict.fromkeys(self._logs, 0), dict(self._patience)
        return heir

    def measured(self, n_rows: int, to: int) -> float:
        """How many times as long as steps of `to` rows those of `n_rows` took."""
        return math.exp(self._log(n_rows) - self._log(to))

    def ratio(self, n_rows: int, to: int) -> float:
        """How many times as long as a step of `to` rows one of `n_rows` takes, with some hope."""
        return math.exp(self._log(n_rows) - self._hope(n_rows) - self._log(to))

    def seconds(self, n_rows: int) -> float:
        """What a step of so many rows would take now; 0 if nothing is known."""
        return self._row_s * math.exp(self._log(n_rows))

    def is_known(self, n_rows: int) -> bool:
        """Whether steps of so many rows were measured."""
        return n_rows in self._logs

    def is_stale(self, n_rows: int) -> bool:
        """Whether steps of so many rows are to be measured again before others are compared with them."""
        measured_at_s = self._measured_at_s.get(n_rows)
        if measured_at_s is None:
            return True
        return self._all_s - measured_at_s > _STALE_STEPS * self._trust.get(n_rows, 1) * self.seconds(n_rows)

    def _hope(self, n_rows: int) -> float:
        n_since = self._n_steps - self._measured_at.get(n_rows, self._n_steps)
        steps = _HOPE_STEPS * self._patience.get(n_rows, 1) if self._n_seen.get(n_rows, 1) else _DOUBTFUL_HOPE_STEPS
        return min(_MOST_HOPE, _HOPE * math.log2(1 + n_since / steps))

    def _correct(self, n_rows: int, other_rows: int, error: float) -> None:
        """The logarithm of the ratio of two sizes was found to be larger by `error`."""
        n_seen, n_other = self._n_seen.get(n_rows, 0), self._n_seen.get(other_rows, 0)
        if n_other < min(n_seen, _FEW):  # it is the one to learn about
            n_rows, other_rows, error, n_seen, n_other = other_rows, n_rows, -error, n_other, n_seen
        is_doubtful = error > _MOST_ERROR and n_rows not in self._logs
        error = max(-_MOST_ERROR, min(_MOST_ERROR, error))
        if is_doubtful:  # it does not count as a measurement
            n_seen, weight = -1, 0.5
        elif n_seen < _FEW:
            # The first steps of a size pay for its graph and its memory, so the lowest measurement counts.
            weight = 1.0 if error < 0 else 1 / (1 + n_seen)
        else:
            weight = max(_LEAST_WEIGHT, 1 / (1 + n_seen))
            if n_seen >= n_other >= _FEW:
                # Both are known about as well: each takes its half.
                self._logs[other_rows] -= weight * error / 2
                weight /= 2
        self._logs[n_rows] = self._log(n_rows) + weight * error
        self._n_seen[n_rows] = n_seen + 1

    def _log(self, n_rows: int) -> float:
        """The logarithm of the ratio to one row: as measured, or in line with the nearest sizes that were."""
        known = self._logs.get(n_rows)
        if known is not None:
            return known
        at = math.log(n_rows)
        below = max((size for size in self._logs if size < n_rows), default=None)
        if self._has_tiles and n_rows >= TILE_ROWS and below is not None and below <= n_rows // 2:
            # A processor computes the attention of a tile at once, so its rows are expected to take half as long.
            # (Measured behind 1,440 tokens, 135M, two threads: 64 rows take 12.6 times as long as one, 63 rows 45
            # times, 16 rows 11.)
            at -= math.log(2)
        above = min((size for size in self._logs if size > n_rows), default=None)
        if below is None and above is None:
            return _PRIOR_SLOPE * at
        if below is None:
            assert above is not None
            return self._logs[above] - _PRIOR_SLOPE * (math.log(above) - at)
        if above is None:
            return self._logs[below] + _PRIOR_SLOPE * (at - math.log(below))
        part = (at - math.log(below)) / (math.log(above) - math.log(below))
        return self._logs[below] + part * (self._logs[above] - self._logs[below])


class DepthCosts:
    """Tables by depth, for attention makes every row dearer the deeper its conversation is, but for 64 rows and more:
    fewer than 256 tokens, fewer than 512, 1,024, and so on. A new one begins as the nearest; if it is deeper, with what
    its rows attend over more, or the first draft there would be far too long."""

    def __init__(self) -> None:
        self._by_depth: dict[bool, dict[int, RowCosts]] = {False: {}, True: {}}

    def at(self, n_tokens: int, *, is_even: bool = False, attend_s: Callable[[], float] = lambda: 0.0) -> RowCosts:
        """Of rows that attend over so many tokens each, which takes `attend_s` a token; with `is_even`, of several
        streams with equal numbers of rows, none of which has a tile for itself."""
        by_depth, kind = self._by_depth[is_even], (n_tokens // _SHALLOW_TOKENS).bit_length()
        costs = by_depth.get(kind)
        if costs is None:
            nearest = min(by_depth, key=lambda known: abs(known - kind), default=None)
            if nearest is None:
                costs = RowCosts(has_tiles=not is_even)
            else:
                n_deeper = (_SHALLOW_TOKENS << kind >> 1) - (_SHALLOW_TOKENS << nearest >> 1)
                costs = by_depth[nearest].heir(max(0, n_deeper) * attend_s())
            by_depth[kind] = costs
        return costs


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
    without them it takes, and `gain` the tokens per second over those without drafts."""

    n_rows: tuple[int, ...]
    ratio: float
    gain: float


@dataclass(frozen=True)
class DraftLimits:
    """`most_each` rows more of a stream and `most_rows` in all; a stream should have a token every `target_s` seconds
    (0: no limit). With `is_even` only equal numbers of rows are computed together, and unless there `may_be_uneven`
    others are not to be. A drafted token that has to be computed takes `draft_s`. So many streams `n_beside` have steps
    of their own, in turn with this one, and wait for it."""

    most_each: int
    most_rows: int
    target_s: float
    is_even: bool
    draft_s: float = 0.0
    may_be_uneven: bool = True
    n_beside: int = 0


def _more_rows(n_streams: int, *, is_even: bool) -> tuple[int, ...]:
    """Numbers of rows beside the streams' own that a step can have; of those with a second pass only the first."""
    if is_even and n_streams > 1:
        return (1, *(n_streams * n_each for n_each in EVEN_DRAFTS))
    return tuple(size - n_streams for size in _sizes(n_streams) if size > n_streams)


def _sizes(n_streams: int) -> tuple[int, ...]:
    return SIZES_ALONE if n_streams == 1 else SIZES


def may_pay(n_streams: int, expected_accepted: float, costs: RowCosts, *, is_even: bool, n_beside: int = 0) -> bool:
    """Whether drafts that are expected to give `expected_accepted` tokens, at most, could be worth their rows: most
    steps are done with the question here."""
    n_all = n_streams + n_beside
    least = LEAST_GAIN * n_all
    return any(
        n_all + min(expected_accepted, n_more) >= least * costs.ratio(n_streams + n_more, n_streams)
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
    judged = (_judged(way, streams, gains, costs, limits) for way in ways)
    best = max(judged, key=lambda choice: choice.gain, default=None)
    return best if best is not None and best.gain >= LEAST_GAIN else None


def expected_gains(chances: Sequence[float]) -> list[float]:
    """The chance that each drafted token becomes part of the answer."""
    gains, product = [], 1.0
    for chance in chances:
        product *= chance
        gains.append(product)
    return gains


def _in_one_pool(gains: list[list[float]], limits: DraftLimits) -> list[tuple[int, ...]]:
    """Rows in the order of what they gain, up to each size; the last stream that has drafts is filled up."""
    by_gain = sorted(((-gain, index) for index, own in enumerate(gains) for gain in own))
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
    n_streams, n_all = len(way), len(way) + limits.n_beside
    if is_one_pass(way, is_even=limits.is_even):
        ratio = costs.ratio(n_streams + sum(way), n_streams)
    else:
        ratio = 1.0 + sum(costs.ratio(n_rows, n_streams) for n_rows in passes(way, streams))
    plain_s = costs.seconds(n_streams)
    n_drawn = max((n for n, stream in zip(way, streams, strict=True) if stream.is_drawn), default=0)
    if n_drawn and plain_s:
        ratio += n_drawn * limits.draft_s / plain_s
    expected = [1 + sum(own[:n_rows]) for own, n_rows in zip(gains, way, strict=True)]
    slowdown = ratio / (1 if limits.n_beside else min(expected))
    token_s = max(limits.target_s, plain_s) if limits.target_s else math.inf
    most_s = MOST_TARGETS * token_s if n_all == 1 else max(token_s, MOST_SLOWDOWN * plain_s)
    if slowdown > MOST_SLOWDOWN or plain_s * slowdown > token_s or plain_s * ratio > most_s:
        return DraftChoice(way, ratio, 0.0)
    return DraftChoice(way, ratio, (sum(expected) + limits.n_beside) / n_all / ratio)


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
