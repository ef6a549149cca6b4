"""More than the server can do: many requests at once, then arrivals at twice the rate at which it worked them off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from localrun.bench.metrics import (
    contended_until_s,
    difference_bound_tokens,
    jain_index,
    lowest_share,
    outcomes,
    service_by_client,
    stream_metrics,
)
from localrun.bench.results import Metrics, Options, StreamRecord
from localrun.bench.streams import CUT_SHORT, Endpoint, Stream, arrivals_s, numbers, open_loop
from localrun.bench.workloads.workload import Measured, define

# The first asks for more than the others together. The burst comes client by client, so a server that goes by arrival
# alone serves the greedy one first.
N_BY_CLIENT = {"greedy": 40, "b": 8, "c": 8, "d": 8}
N_PROMPT = 200
N_OUTPUT = 64
OVERLOAD = 2.0
# Enough to see a queue grow on the fastest machine.
MAX_ARRIVALS = 2000


async def measure(endpoint: Endpoint, options: Options) -> Measured:
    def begin(part: str, index: int, client: str, intended_at_s: float | None = None) -> Stream:
        prompt = numbers(options.seed, f"overload {part} {index}", N_PROMPT)
        return endpoint.begin(prompt, N_OUTPUT, group=part, client=client, intended_at_s=intended_at_s)

    clients = [client for client, count in N_BY_CLIENT.items() for _ in range(count)]
    burst = [begin("burst", index, client) for index, client in enumerate(clients)]
    records = await asyncio.gather(*(stream.task for stream in burst))
    metrics = _metrics("burst", records) | _shares(records, options.slots)
    measured = Measured(
        metrics, {"n_burst": len(clients), "n_clients": len(N_BY_CLIENT), "n_prompt": N_PROMPT, "n_output": N_OUTPUT}
    )
    n_complete = sum(record.is_complete for record in records)
    if not n_complete:
        measured.note = "no request of the burst completed, so there is no rate to double"
        return measured
    rate_per_s = OVERLOAD * n_complete / metrics["burst_wall_s"]
    times_s = arrivals_s(rate_per_s=rate_per_s, seconds=options.seconds, seed=options.seed)[:MAX_ARRIVALS]
    arrived = await open_loop(times_s, lambda index, at_s: begin("open", index, clients[index % len(clients)], at_s))
    measured.parameters |= {"open_rate_per_s": rate_per_s, "open_seconds": options.seconds, "n_open": len(times_s)}
    measured.metrics |= _metrics("open", arrived)
    return measured


def _metrics(part: str, records: Sequence[StreamRecord]) -> Metrics:
    metrics = stream_metrics(part, records) | outcomes(part, records, ignoring=CUT_SHORT)
    silent = [record for record in records if record.status == 429 and record.retry_after_s is None]
    metrics[f"{part}_refused_without_retry_after_count"] = len(silent)
    if any(record.is_complete for record in records):
        metrics[f"{part}_longest_wait_s"] = metrics[f"{part}_ttft_max_s"]
    return metrics


def _shares(records: Sequence[StreamRecord], slots: int) -> Metrics:
    """Of the service until the first client has nothing waiting; later there is nothing to be fair about."""
    if not any(record.is_complete for record in records):
        return {}
    service = service_by_client(records, contended_until_s(records))
    difference = max(service.values()) - min(service.values())
    bound = difference_bound_tokens(n_prompt=N_PROMPT, n_output=N_OUTPUT, slots=slots)
    return {
        "burst_lowest_share_ratio": lowest_share(service),
        "burst_jain_ratio": jain_index(service),
        "burst_service_difference_tokens": difference,
        "burst_difference_of_bound": difference / bound,
    }


WORKLOAD = define(
    "overload",
    f"{sum(N_BY_CLIENT.values())} requests at once from {len(N_BY_CLIENT)} clients, then {OVERLOAD:g} times that rate",
    ("burst_wall_s", "burst_completion_ratio", "burst_refused_count", "burst_failed_count", "burst_longest_wait_s",
     "burst_lowest_share_ratio", "burst_difference_of_bound", "open_completion_ratio", "open_refused_count",
     "open_failed_count", "open_longest_wait_s"),
    measure,
)  # fmt: skip
