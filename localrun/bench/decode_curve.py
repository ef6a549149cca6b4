"""The decode curve: what a server makes at each number of streams, and how near that is to what memory allows.

Pure. Does not: measure the bandwidth, or draw.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

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
