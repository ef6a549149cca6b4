"""Short prompts, 128 tokens out, at rising concurrency: the decode curve, its knee and its plateau."""

from __future__ import annotations

import asyncio

from localrun.bench.decode_curve import knee
from localrun.bench.metrics import stream_metrics
from localrun.bench.results import Options
from localrun.bench.streams import Endpoint, numbers
from localrun.bench.workloads.workload import Measured, define

N_PROMPT = 50
N_OUTPUT = 128
MAX_STREAMS = 128


async def measure(endpoint: Endpoint, options: Options) -> Measured:
    """As many streams as asked for, or doubling until a doubling gains too little."""
    measured = Measured({}, {"n_prompt": N_PROMPT, "n_output": N_OUTPUT})
    rates: dict[int, float] = {}
    for n_streams in options.streams or [2**exponent for exponent in range(MAX_STREAMS.bit_length())]:
        prompts = [numbers(options.seed, f"decode {n_streams} {index}", N_PROMPT) for index in range(n_streams)]
        group = f"c{n_streams}"
        records = await asyncio.gather(*(endpoint.send(prompt, N_OUTPUT, group=group) for prompt in prompts))
        metrics = stream_metrics(group, records)
        measured.metrics |= metrics
        if f"{group}_decode_tokens_per_s" in metrics:
            rates[n_streams] = metrics[f"{group}_decode_tokens_per_s"]
        if not options.streams and knee(rates) is not None:
            break
    measured.parameters["streams"] = list(rates)
    if rates:
        measured.metrics["plateau_decode_tokens_per_s"] = max(rates.values())
    at = knee(rates)
    if at is not None:
        measured.metrics["knee_streams"] = at
    return measured


WORKLOAD = define(
    "decode",
    f"{N_PROMPT}-token prompts, {N_OUTPUT} tokens out, at rising concurrency until the knee",
    ("c*_decode_tokens_per_s", "plateau_decode_tokens_per_s", "knee_streams"),
    measure,
)
