"""From records to metrics: percentiles, gaps, rates, goodput, who got how much, and the decode curve. Pure.

TTFT (per request), ITL (per gap, pooled over all streams) and TPOT (per request) are kept apart: a mean per request
hides the gap that a person saw, a pool of gaps hides the request that was slow throughout.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec

from localrun.bench.results import Metrics, RunResult, StreamRecord

REPORTED = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, so that 50 is the usual median. `values` must not be empty.

    Definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), which is numpy's default.
    """
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = math.ceil(rank)
    # Written so that equal neighbours give exactly their value, and never anything outside them.
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summary(name: str, values_s: Iterable[float]) -> dict[str, float]:
    """`<name>_p50_s`, `_p95_s`, `_p99_s` and `_max_s` of seconds; nothing without values."""
    values = list(values_s)
    if not values:
        return {}
    reported = {f"{name}_p{percent}_s": percentile(values, percent) for percent in REPORTED}
    return {**reported, f"{name}_max_s": max(values)}


# --- the silences between pieces of a stream ---


def gaps_s(arrivals_s: Sequence[float]) -> list[float]:
    """Seconds between neighbouring arrivals: one less than there are arrivals."""
    return [later - earlier for earlier, later in pairwise(arrivals_s)]


def gaps_touching_s(arrivals_s: Sequence[float], start_s: float, end_s: float) -> list[float]:
    """The gaps that lie at least partly within [start_s, end_s], each in its full length.

    A gap belongs to what happened during any part of it: a stall that begins before a window ends is that window's.
    """
    return [later - earlier for earlier, later in pairwise(arrivals_s) if later > start_s and earlier < end_s]


def longest_s(gaps: Iterable[float]) -> float:
    """0 without gaps."""
    return max(gaps, default=0.0)


def stream_metrics(group: str, records: Sequence[StreamRecord]) -> Metrics:
    """All there is to say about requests that were sent together; only those that completed count. `group` starts the
    names, unless it is empty."""
    done = [record for record in records if record.is_complete]
    if not done:
        return {}
    start = f"{group}_" if group else ""
    gaps = [gap for record in done for gap in gaps_s(record.arrivals_s)]
    tpots = [record.tpot_s for record in done if record.tpot_s is not None]
    metrics: Metrics = {f"{start}wall_s": wall_s(done)}
    decode = decode_tokens_per_s(done)
    if decode is not None:
        metrics[f"{start}decode_tokens_per_s"] = decode
    if any(tpots):
        metrics[f"{start}request_p50_tokens_per_s"] = percentile([1 / tpot for tpot in tpots if tpot > 0], 50)
    prefill = prefill_tokens_per_s(done)
    if prefill is not None:
        metrics[f"{start}prefill_tokens_per_s"] = prefill
    metrics |= summary(f"{start}ttft", (record.ttft_s for record in done))
    metrics |= summary(f"{start}itl", gaps)
    metrics |= summary(f"{start}tpot", tpots)
    metrics[f"{start}longest_gap_s"] = longest_s(gaps)
    metrics[f"{start}prompt_tokens"] = sum(record.n_prompt for record in done)
    metrics[f"{start}cached_tokens"] = sum(record.n_cached for record in done)
    return metrics


def outcomes(group: str, records: Iterable[StreamRecord], *, ignoring: str) -> Metrics:
    """How many requests completed, were refused (429), and failed otherwise. Those whose problem is `ignoring`, which
    the load generator ended itself, do not count."""
    counted = [record for record in records if record.problem != ignoring]
    start = f"{group}_" if group else ""
    n_complete = sum(record.is_complete for record in counted)
    n_refused = sum(record.status == 429 for record in counted)
    return {
        f"{start}completion_ratio": n_complete / len(counted) if counted else 1.0,
        f"{start}refused_count": n_refused,
        f"{start}failed_count": len(counted) - n_complete - n_refused,
    }


def wall_s(records: Sequence[StreamRecord]) -> float:
    """From the first intended send time to the last text."""
    return max(record.arrivals_s[-1] for record in records) - min(record.intended_at_s for record in records)


def decode_tokens_per_s(records: Sequence[StreamRecord]) -> float | None:
    """The tokens that came while the most streams were decoding at once, over the time for which they were.

    A stream decodes from its first token to its last. The time in which some still wait for their first does not count:
    a server that answers the first stream early would seem slower than one that lets all wait for the last. All pieces
    of a stream count as equally many tokens.
    """
    bounds = sorted(bound for record in records for bound in ((record.arrivals_s[0], 1), (record.arrivals_s[-1], -1)))
    at_once = list(accumulate(change for _, change in bounds))
    most = max(at_once)
    windows = [
        (start, end)
        for n_streams, (start, _), (end, _) in zip(at_once[:-1], bounds[:-1], bounds[1:], strict=True)
        if n_streams == most
    ]
    seconds = sum(end - start for start, end in windows)
    n_tokens = sum(
        sum(start < arrival <= end for arrival in record.arrivals_s for start, end in windows)
        * record.n_output / len(record.arrivals_s)
        for record in records
    )  # fmt: skip
    return n_tokens / seconds if seconds > 0 and n_tokens > 0 else None


def prefill_tokens_per_s(records: Sequence[StreamRecord]) -> float | None:
    """Prompt tokens that were not cached, over the time from the first sending to the last first token: the rate at
    which prompts were worked off as clients saw it, which includes waiting for a slot."""
    n_tokens = sum(record.n_prompt - record.n_cached for record in records)
    seconds = max(record.arrivals_s[0] for record in records) - min(record.intended_at_s for record in records)
    return n_tokens / seconds if seconds > 0 and n_tokens > 0 else None


# --- goodput: the requests per second that were answered as fast as was asked for ---
# A request is good when it completed, its first token came within the TTFT limit, and its mean time per output token
# is within the ITL limit (DistServe, OSDI 2024). The mean can hide a long silence, and requests that are dropped do
# not count against it, so goodput is read together with the completion ratio and the longest gap.


def is_good(record: StreamRecord, *, ttft_limit_s: float, itl_limit_s: float) -> bool:
    """A request of one output token has no time per output token to miss."""
    if not record.is_complete or record.ttft_s > ttft_limit_s:
        return False
    return record.tpot_s is None or record.tpot_s <= itl_limit_s


def goodput(
    group: str, records: Sequence[StreamRecord], seconds: float, *, ttft_limit_s: float, itl_limit_s: float
) -> Metrics:
    """`goodput_requests_per_s` over `seconds`, and `goodput_ratio`: the good ones of all that were sent."""
    n_good = sum(is_good(record, ttft_limit_s=ttft_limit_s, itl_limit_s=itl_limit_s) for record in records)
    start = f"{group}_" if group else ""
    return {
        f"{start}goodput_requests_per_s": n_good / seconds,
        f"{start}goodput_ratio": n_good / len(records) if records else 0.0,
    }


# --- who got how much of the server while everybody wanted it ---
# Service is counted as the Virtual Token Counter does (Sheng et al., "Fairness in Serving Large Language Models", OSDI
# 2024): prompt tokens that were computed, plus output tokens with twice the weight. From outside, a prompt's service
# shows when its first token comes.

OUTPUT_WEIGHT = 2.0


def contended_until_s(records: Sequence[StreamRecord]) -> float:
    """The moment at which the first client has nothing waiting any more: its last request has its first token. Until
    then all compete. Needs one completed record."""
    last_s: dict[str, float] = {}
    for record in records:
        if record.is_complete:
            last_s[record.client] = max(last_s.get(record.client, 0.0), record.arrivals_s[0])
    return min(last_s.values())


def service_tokens(record: StreamRecord, until_s: float) -> float:
    """The weighted tokens that a request had got by then."""
    n_pieces = bisect_right(record.arrivals_s, until_s)
    if n_pieces == 0:
        return 0.0
    # What was cut short never heard the server's count; there, a piece is a token.
    n_output = record.n_output or len(record.arrivals_s)
    computed = record.n_prompt - record.n_cached
    return computed + OUTPUT_WEIGHT * n_output * n_pieces / len(record.arrivals_s)


def service_by_client(records: Sequence[StreamRecord], until_s: float) -> dict[str, float]:
    """Every client that sent something has an entry."""
    service: dict[str, float] = {}
    for record in records:
        service[record.client] = service.get(record.client, 0.0) + service_tokens(record, until_s)
    return service


def lowest_share(service: dict[str, float]) -> float:
    """The least served client's part of an equal share: 1.0 is fair, 0.0 is nothing at all."""
    total = sum(service.values())
    return min(service.values()) * len(service) / total if total else 1.0


def difference_bound_tokens(*, n_prompt: int, n_output: int, slots: int) -> float:
    """The most by which the service of two clients who both wait may differ under the Virtual Token Counter: twice the
    larger of a prompt's service and that of a full batch, weighted as output (theorem 4.4 there)."""
    return 2 * max(n_prompt, OUTPUT_WEIGHT * slots * (n_prompt + n_output))


def jain_index(service: dict[str, float]) -> float:
    """1.0 when all get the same, 1/n when one of n gets everything (Jain, Chiu and Hawe, 1984)."""
    squares = sum(value * value for value in service.values())
    return sum(service.values()) ** 2 / (len(service) * squares) if squares else 1.0


# --- the decode curve: what a server makes at each number of streams, and how near that is to what memory allows ---

CURVE_WORKLOAD = "decode"

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
        own = [result for result in results if result.target.name == name and result.workload == CURVE_WORKLOAD]
        streams = {int(found[1]) for result in own for metric in result.metrics if (found := _RATE.fullmatch(metric))}
        if streams:
            curves[name] = [_curve_point(n_streams, own, bound_of) for n_streams in sorted(streams)]
    return curves


def _curve_point(n_streams: int, results: Sequence[RunResult], bound_of: BoundOf | None) -> CurvePoint:
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
    return statistics.mean(_size(size.get("n_prompt")) + _size(size.get("n_output")) / 2 for size in sizes)


def _size(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# --- where more streams stop paying ---

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
