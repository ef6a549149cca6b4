"""Goodput: the requests per second that were answered as fast as was asked for.

A request is good when it completed, its first token came within the TTFT limit, and its mean time per output token is
within the ITL limit (DistServe, OSDI 2024). The mean can hide a long silence, and requests that are dropped do not
count against it, so goodput is read together with the completion ratio and the longest gap.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrun.bench.record import StreamRecord
from localrun.bench.results import Metrics


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
