"""What computing costs on one machine with one model, seconds of a step, of a batch of prompt rows, of a copy; and the
virtual clock on which they pass.

A step of n streams takes base[n] + per_token[n] * (tokens of context of all of them), or what was measured. Prompt rows
take (fixed + row * rows + row_depth * rows * (depth + rows / 2)) * factor[rows], the form that the engine itself learns
(`schedule/budget.py`). The coefficients are measured (`calibration.py`) or estimated (`roofline.py`). Pure: nothing
here, and nothing that is simulated, asks for the real time.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from localrun.engine.schedule.budget import TILE_ROWS, tile_waste
from localrun.errors import LocalrunError

LEAST_S = 1e-6
# Of anything that was measured; a file may say something else.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=1e3)]


class Sample(NamedTuple):
    """`n_rows` rows took `seconds`. Of streams `tokens` is the context of all together, of a prompt its depth."""

    n_rows: int
    tokens: float
    seconds: float


class StreamCosts(msgspec.Struct, frozen=True):
    """Of steps without prompts, by number of streams, ascending. `points` are (tokens, seconds) as measured, of each
    number: between them a step is on the line from one to the next, where there are two or more."""

    streams: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(min_length=1)]
    base_s: tuple[Seconds, ...]
    per_token_s: tuple[Seconds, ...]
    points: tuple[tuple[tuple[float, Seconds], ...], ...] = ()

    def __post_init__(self) -> None:
        if list(self.streams) != sorted(set(self.streams)):
            raise ValueError("numbers of streams are ascending")
        if not len(self.streams) == len(self.base_s) == len(self.per_token_s):
            raise ValueError("each number of streams has its two costs")
        if len(self.points) not in (0, len(self.streams)):
            raise ValueError("each number of streams has its points")

    def step_s(self, n_streams: int, tokens: float) -> float:
        """Seconds of a step, with so many tokens of context together. Between two numbers of streams that were measured
        it is a straight line, at the same tokens of each, and beyond the most streams it goes on."""
        if len(self.streams) == 1:
            return self._measured_s(0, tokens)
        at = next((at for at, (_, upper) in enumerate(pairwise(self.streams)) if n_streams <= upper), -2)
        low, high = self.streams[at], self.streams[at + 1]
        low_s, high_s = (self._measured_s(where, tokens * n / n_streams) for where, n in ((at, low), (at + 1, high)))
        return max(low_s + (n_streams - low) / (high - low) * (high_s - low_s), LEAST_S)

    def _measured_s(self, at: int, tokens: float) -> float:
        line_s = self.base_s[at] + self.per_token_s[at] * tokens
        points = self.points[at] if self.points else ()
        if len(points) < 2:
            return line_s
        right = min(max(1, bisect_left(points, (tokens,))), len(points) - 1)
        (from_tokens, from_s), (to_tokens, to_s) = points[right - 1], points[right]
        if tokens > to_tokens:
            return to_s + self.per_token_s[at] * (tokens - to_tokens)
        return max(LEAST_S, from_s + (tokens - from_tokens) * max(0.0, to_s - from_s) / (to_tokens - from_tokens))

    def scaled(self, factor: float) -> StreamCosts:
        return StreamCosts(
            self.streams,
            tuple(factor * s for s in self.base_s),
            tuple(factor * s for s in self.per_token_s),
            tuple(tuple((tokens, factor * s) for tokens, s in points) for points in self.points),
        )

    @classmethod
    def fitted(cls, samples: Iterable[Sample]) -> StreamCosts:
        """Raises LocalrunError without samples."""
        by_rows: dict[int, list[Sample]] = {}
        for sample in samples:
            by_rows.setdefault(sample.n_rows, []).append(sample)
        if not by_rows:
            raise LocalrunError("no step was measured, so nothing can be planned")
        lines = {
            n_rows: least_squares([(1.0, each.tokens) for each in own], [each.seconds for each in own])
            for n_rows, own in sorted(by_rows.items())
        }
        points = tuple(tuple(sorted({each.tokens: each.seconds for each in by_rows[n]}.items())) for n in lines)
        return cls(
            tuple(lines),
            tuple(base for base, _ in lines.values()),
            tuple(per_token for _, per_token in lines.values()),
            points,
        )


class PromptCosts(msgspec.Struct, frozen=True):
    """Of prompt rows, in the background or among the streams. `factors` are by number of rows; the nearest counts.
    `few` is of fewer rows than a tile, whose attention processors compute one by one, at several times the cost. Where
    attention is computed in tiles, `n_heads` of the model and `n_threads` say how many there are for each row."""

    fixed_s: Seconds
    row_s: Seconds
    row_depth_s: Seconds
    factors: dict[int, Factor] = {}
    few: PromptCosts | None = None
    n_heads: Annotated[int, msgspec.Meta(ge=0)] = 0
    n_threads: Annotated[int, msgspec.Meta(ge=1)] = 1

    def batch_s(self, n_rows: int, depth: float) -> float:
        """Seconds of so many rows of one prompt, behind `depth` tokens of it."""
        if self.few is not None and n_rows < TILE_ROWS:
            return self.few.batch_s(n_rows, depth)
        seconds = self.fixed_s + self.row_s * n_rows + self.row_depth_s * self._attended(n_rows, depth)
        if self.factors:
            seconds *= self.factors[min(self.factors, key=lambda known: abs(known - n_rows))]
        return max(seconds, LEAST_S)

    def scaled(self, factor: float) -> PromptCosts:
        return msgspec.structs.replace(
            self,
            fixed_s=factor * self.fixed_s,
            row_s=factor * self.row_s,
            row_depth_s=factor * self.row_depth_s,
            few=self.few and self.few.scaled(factor),
        )

    @classmethod
    def fitted(cls, samples: Sequence[Sample], n_heads: int = 0, n_threads: int = 1) -> PromptCosts:
        """Raises LocalrunError without samples."""
        few, tiles = ([each for each in samples if (each.n_rows < TILE_ROWS) is is_few] for is_few in (True, False))
        if few and tiles:
            return msgspec.structs.replace(cls.line(tiles, n_heads, n_threads), few=cls.line(few))
        return cls.line(samples, n_heads, n_threads)

    @classmethod
    def line(cls, samples: Sequence[Sample], n_heads: int = 0, n_threads: int = 1) -> PromptCosts:
        """The same of samples none of which has a tile, or all."""
        if not samples:
            raise LocalrunError("no prompt was measured, so nothing can be planned")
        shape = cls(0.0, 0.0, 0.0, n_heads=n_heads, n_threads=n_threads)
        features = [(1.0, float(n), shape._attended(n, depth)) for n, depth, _ in samples]
        fixed_s, row_s, row_depth_s = least_squares(features, [each.seconds for each in samples])
        line = msgspec.structs.replace(shape, fixed_s=fixed_s, row_s=row_s, row_depth_s=row_depth_s)
        ratios: dict[int, list[float]] = {}
        for n_rows, depth, seconds in samples:
            ratios.setdefault(n_rows, []).append(seconds / line.batch_s(n_rows, depth))
        return msgspec.structs.replace(
            line, factors={n_rows: statistics.median(own) for n_rows, own in sorted(ratios.items())}
        )

    def _attended(self, n_rows: int, depth: float) -> float:
        """Over how many tokens all rows attend together, with what tiles compute for nothing."""
        return tile_waste(n_rows, self.n_heads, self.n_threads) * n_rows * (depth + n_rows / 2)


class WaitCosts(msgspec.Struct, frozen=True):
    """By how many seconds a step takes longer beside a batch of the background: it waits for a piece of that, and then
    its caches are cold. `quantiles_s` are equally far apart, from the least to the most, for each of `batches_s`, which
    is how long a batch takes by itself, ascending."""

    batches_s: Annotated[tuple[Seconds, ...], msgspec.Meta(min_length=1)]
    quantiles_s: tuple[Annotated[tuple[Seconds, ...], msgspec.Meta(min_length=2)], ...]

    def __post_init__(self) -> None:
        if list(self.batches_s) != sorted(set(self.batches_s)) or len(self.batches_s) != len(self.quantiles_s):
            raise ValueError("durations of batches are ascending, and each has its quantiles")

    def extra_s(self, batch_s: float, share: float) -> float:
        """`share` of all steps take no longer than this. A line through the shortest and the longest batch."""
        short_s, long_s = _between(self.quantiles_s[0], share), _between(self.quantiles_s[-1], share)
        if len(self.batches_s) == 1:
            return long_s
        way = (batch_s - self.batches_s[0]) / (self.batches_s[-1] - self.batches_s[0])
        return max(0.0, short_s + max(0.0, way) * (long_s - short_s))

    def scaled(self, factor: float) -> WaitCosts:
        return WaitCosts(
            tuple(factor * s for s in self.batches_s), tuple(tuple(factor * s for s in own) for own in self.quantiles_s)
        )


def _between(quantiles: Sequence[float], share: float) -> float:
    at = share * (len(quantiles) - 1)
    left = min(int(at), len(quantiles) - 2)
    return quantiles[left] + (at - left) * (quantiles[left + 1] - quantiles[left])


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """All of them. `background` is of batches beside the steps, `beside` of rows among the streams. `drafts` is of the
    rows of several streams that draft, computed in one pass, and `alone_drafts` of one stream's; None where nobody has
    measured them: then each row counts as a stream.

    Beside a batch of the background a step takes longer (`waits`), and the rest of that batch takes `cold` times as
    long, because caches are cold. A token's state is copied from cells
    to cells in `copy_token_s`, into memory in `save_token_s`, and back in `restore_token_s`; each copy takes `copy_s`
    besides. A byte is read from disk in `disk_byte_s`. `rebuild_s` is for new KV cells. The engine's own work takes
    `host_s` in each step and `host_row_s` for each stream. The daemon takes `delta_s` for each token it passes on from
    the processors that compute, and a request is `request_s` on its way. Times vary by a log-normal factor of `sigma`.
    """

    streams: StreamCosts
    background: PromptCosts
    beside: PromptCosts
    drafts: PromptCosts | None = None
    alone_drafts: PromptCosts | None = None
    waits: WaitCosts | None = None
    cold: Factor = 1.0
    copy_s: Seconds = 0.0
    copy_token_s: Seconds = 0.0
    save_token_s: Seconds = 0.0
    restore_token_s: Seconds = 0.0
    disk_byte_s: Seconds = 1e-9
    rebuild_s: Seconds = 0.2
    host_s: Seconds = 1e-4
    host_row_s: Seconds = 0.0
    delta_s: Seconds = 0.0
    request_s: Seconds = 0.0
    sigma: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0

    def pass_s(self, n_streams: int, n_rows: int, depth: float) -> float:
        """Of streams that have `n_rows` rows together, drafts among them, each of which attends over `depth` tokens."""
        measured = self.alone_drafts if n_streams == 1 else self.drafts
        if n_rows == n_streams or measured is None:
            return self.streams.step_s(n_rows, n_rows * depth)
        return measured.batch_s(n_rows, depth)

    def scaled(self, *, prompts: float = 1.0, decode: float = 1.0, host: float = 1.0) -> Costs:
        """The costs of a machine that takes so many times as long."""
        return msgspec.structs.replace(
            self,
            streams=self.streams.scaled(decode),
            background=self.background.scaled(prompts),
            beside=self.beside.scaled(prompts),
            waits=self.waits and self.waits.scaled(prompts),
            drafts=self.drafts and self.drafts.scaled(decode),
            alone_drafts=self.alone_drafts and self.alone_drafts.scaled(decode),
            host_s=host * self.host_s,
            host_row_s=host * self.host_row_s,
            delta_s=host * self.delta_s,
            request_s=host * self.request_s,
        )


def least_squares(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The coefficients >= 0 with the smallest relative errors: those that come out negative are left out, one by one
    (an active set)."""
    matrix, target = np.array(features, float), np.array(seconds, float)
    matrix = matrix / target[:, np.newaxis]
    scales = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found = np.zeros(matrix.shape[1])
    kept = list(range(matrix.shape[1]))
    while kept:
        part, *_ = np.linalg.lstsq(matrix[:, kept] / scales[kept], np.ones(len(target)), rcond=None)
        if (part >= 0).all():
            found[kept] = part / scales[kept]
            break
        del kept[int(part.argmin())]
    return tuple(map(float, found))


def errors_of(predicted: Mapping[Sample, float]) -> tuple[float, float]:
    """The median and the largest relative error of a fit."""
    errors = [abs(seconds / sample.seconds - 1) for sample, seconds in predicted.items()]
    return (statistics.median(errors), max(errors)) if errors else (0.0, 0.0)


class Account(StrEnum):
    """What time is spent on."""

    PROMPTS = "computing prompts"
    DECODE = "decoding"
    COPIES = "copying state"
    HOST = "scheduling and sampling"
    DAEMON = "answering clients"
    IDLE = "idle"


class VirtualClock:
    """The engine's clock. `spent_s` adds up to the time that has passed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.spent_s = dict.fromkeys(Account, 0.0)

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float, account: Account) -> None:
        """Let time pass: late in a long run a moment that is too short to be added is the shortest that can be."""
        before_s = self.now_s
        self.now_s += seconds
        if self.now_s == before_s and seconds > 0:
            self.now_s = math.nextafter(before_s, math.inf)
        self.spent_s[account] += seconds

    def sleep_until(self, at_s: float, account: Account) -> None:
        """Let time pass until then, none if that is over."""
        if at_s > self.now_s:
            self.spent_s[account] += at_s - self.now_s
            self.now_s = at_s
