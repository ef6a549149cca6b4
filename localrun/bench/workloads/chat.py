"""Short chats that arrive by themselves, in an open loop: how many are answered as fast as a person wants."""

from __future__ import annotations

import random
import time

from localrun.bench.metrics import goodput, stream_metrics
from localrun.bench.results import Options
from localrun.bench.streams import Endpoint, Stream, arrivals_s, numbers, open_loop
from localrun.bench.workloads.workload import Measured, define

N_PROMPT = (50, 350)
N_OUTPUT = (16, 112)


async def measure(endpoint: Endpoint, options: Options) -> Measured:
    """Lengths are uniform within their bounds. The chats of the last seconds are waited for, too."""
    times_s = arrivals_s(
        rate_per_s=options.rate_per_s, seconds=options.seconds, burstiness=options.burstiness, seed=options.seed
    )
    chosen = random.Random(options.seed)
    sizes = [(chosen.randint(*N_PROMPT), chosen.randint(*N_OUTPUT)) for _ in times_s]
    prompts = [numbers(options.seed, f"chat {index}", n_prompt) for index, (n_prompt, _) in enumerate(sizes)]

    def begin(index: int, intended_at_s: float) -> Stream:
        return endpoint.begin(prompts[index], sizes[index][1], intended_at_s=intended_at_s)

    start_s = time.perf_counter()
    records = await open_loop(times_s, begin)
    seconds = max(options.seconds, time.perf_counter() - start_s)
    limits = {"ttft_limit_s": options.ttft_limit_s, "itl_limit_s": options.itl_limit_s}
    metrics = stream_metrics("", records) | goodput("", records, seconds, **limits)
    metrics["send_delay_max_s"] = max((record.sent_at_s - record.intended_at_s for record in records), default=0.0)
    return Measured(
        metrics,
        {"rate_per_s": options.rate_per_s, "burstiness": options.burstiness, "seconds": options.seconds, **limits},
        "" if records else "no chat arrived in this time; a longer --seconds or a higher --rate brings some",
    )


WORKLOAD = define(
    "chat",
    "short chats in an open loop: goodput under a TTFT and an inter-token limit",
    (
        "goodput_requests_per_s",
        "goodput_ratio",
        "ttft_p50_s",
        "ttft_p99_s",
        "itl_p50_s",
        "itl_p99_s",
        "longest_gap_s",
        "wall_s",
    ),
    measure,
)
