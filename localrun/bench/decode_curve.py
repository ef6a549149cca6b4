"""The decode curve: what a server makes at each number of streams, and how near that is to what memory allows;
and the knee, the number of streams from which more of them stop paying.

Pure. Does not: measure the bandwidth, or draw.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec

from localrun.bench.results import RunResult

WORKLOAD = "decode"

_RATE = re.compile(r"c(\d+)_decode_tokens_per_s")

BoundOf = Callable[[int, float], float]


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds. `tokens_per_s` is of all streams together, `request_tokens_per_s` of a single one;
    `prefill_tokens_per_s` is of their prompts. `bound_tokens_per_s` is None where the bandwidth is not known."""

    streams: int
    tokens_per_s: float
    request_tokens_per_s: float
    prefill_tokens_per_s: float
    bound_tokens_per_s: float | None

    @property
    def share_of_bound(self) -> float | None:
        return None if self.bound_tokens_per_s is None else self.tokens_per_s / self.bound_tokens_per_s


def decode_curves(results: Sequence[RunResult], bound_of: BoundOf | None) -> dict[str, list[CurvePoint]]:
    """By server, points by rising number of streams, from the runs of the workload `decode`. A server without any is
    left out.

    `bound_of` says the bound for a number of streams with so many tokens of context each; halfway through, a stream
    has its prompt and half of its output.
    """
    curves: dict[str, list[CurvePoint]] = {}
    for name in dict.fromkeys(result.target.name for result in results):
        own = [result for result in results if result.target.name == name and result.workload == WORKLOAD]
        streams = {int(found[1]) for result in own for metric in result.metrics if (found := _RATE.fullmatch(metric))}
        if streams:
            curves[name] = [_point(n_streams, own, bound_of) for n_streams in sorted(streams)]
    return curves


def _point(n_streams: int, results: Sequence[RunResult], bound_of: BoundOf | None) -> CurvePoint:
    def median(what: str) -> float:
        values = [result.metrics[name] for result in results if (name := f"c{n_streams}_{what}") in result.metrics]
        return statistics.median(values) if values else 0.0

    return CurvePoint(
        streams=n_streams,
        tokens_per_s=median("decode_tokens_per_s"),
        request_tokens_per_s=median("request_p50_tokens_per_s"),
        prefill_tokens_per_s=median("prefill_tokens_per_s"),
        bound_tokens_per_s=None if bound_of is None else bound_of(n_streams, _context_tokens(results)),
    )


def _context_tokens(results: Sequence[RunResult]) -> float:
    sizes = [result.parameters for result in results]
    return statistics.mean(_number(size.get("n_prompt")) + _number(size.get("n_output")) / 2 for size in sizes)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# --- Where more streams stop paying ---

# Less than this much more per doubling of the streams is no gain: every stream gets about half as fast.
LEAST_GAIN = 0.10


def knee(rates: Mapping[int, float]) -> int | None:
    """The first number of streams from which the step to the next one gains less than LEAST_GAIN per doubling.

    `rates` are aggregate tokens per second by number of streams. None when every step gains more: the knee lies beyond.
    """
    for fewer, more in pairwise(sorted(rates)):
        if gain_per_doubling(fewer, rates[fewer], more, rates[more]) < LEAST_GAIN:
            return fewer
    return None


def gain_per_doubling(fewer: int, rate_of_fewer: float, more: int, rate_of_more: float) -> float:
    """0.0 is the same rate, 1.0 is twice the rate for twice the streams."""
    return math.pow(rate_of_more / rate_of_fewer, 1 / math.log2(more / fewer)) - 1
