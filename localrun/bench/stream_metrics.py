"""From records to metrics. TTFT (per request), ITL (per gap, pooled over all streams) and TPOT (per request) are kept
apart: a mean per request hides the gap that a person saw, a pool of gaps hides the request that was slow throughout.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from localrun.bench.gaps import gaps_s, longest_s
from localrun.bench.percentiles import percentile, summary
from localrun.bench.record import StreamRecord
from localrun.bench.results import Metrics


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
