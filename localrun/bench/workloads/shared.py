"""Several requests at once with the same long system prompt: how much of it is computed more than once."""

from __future__ import annotations

import asyncio

from localrun.bench.metrics import stream_metrics
from localrun.bench.results import Options
from localrun.bench.streams import Endpoint, numbers
from localrun.bench.workloads.workload import Measured, define

N_REQUESTS = 8
N_SYSTEM = 1200
N_OWN = 24
N_OUTPUT = 32


async def measure(endpoint: Endpoint, options: Options) -> Measured:
    system = numbers(options.seed, "shared system", N_SYSTEM)
    measured = Measured({}, {"n_requests": N_REQUESTS, "n_system": N_SYSTEM, "n_own": N_OWN, "n_output": N_OUTPUT})
    for group in ("cold", "warm"):
        own = [numbers(options.seed, f"shared {group} {index}", N_OWN) for index in range(N_REQUESTS)]
        records = await asyncio.gather(*(endpoint.send(system + message, N_OUTPUT, group=group) for message in own))
        measured.metrics |= stream_metrics(group, records)
    return measured


WORKLOAD = define(
    "shared",
    f"{N_REQUESTS} requests at once with the same {N_SYSTEM:,}-token system prompt, cold, then warm",
    ("cold_wall_s", "cold_ttft_p50_s", "cold_ttft_max_s", "warm_wall_s", "warm_ttft_p50_s", "warm_ttft_max_s"),
    measure,
)
