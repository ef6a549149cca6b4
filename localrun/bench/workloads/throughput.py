"""How much a server gets done on short prompts.

`decode`: 128 tokens out at rising concurrency: the decode curve, its knee and its plateau. `chat`: chats that arrive by
themselves, in an open loop: how many are answered as fast as a person wants.
"""

from __future__ import annotations

import asyncio
import math
import time

from localrun.bench.arrivals import built_in_files
from localrun.bench.metrics import goodput, knee, stream_metrics
from localrun.bench.results import Options
from localrun.bench.streams import Endpoint, Stream, numbers, open_loop
from localrun.bench.workloads.workload import WorkloadResult, define

# --- decode ---

N_DECODE_PROMPT = 50
N_DECODE_OUTPUT = 128
MAX_STREAMS = 128


async def _decode(endpoint: Endpoint, options: Options) -> WorkloadResult:
    """As many streams as asked for, or doubling until a doubling gains too little."""
    measured = WorkloadResult({}, {"n_prompt": N_DECODE_PROMPT, "n_output": N_DECODE_OUTPUT})
    rates: dict[int, float] = {}
    for n_streams in options.streams or [2**exponent for exponent in range(MAX_STREAMS.bit_length())]:
        prompts = [numbers(options.seed, f"decode {n_streams} {index}", N_DECODE_PROMPT) for index in range(n_streams)]
        group = f"c{n_streams}"
        records = await asyncio.gather(*(endpoint.send(prompt, N_DECODE_OUTPUT, group=group) for prompt in prompts))
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


DECODE = define(
    "decode",
    f"{N_DECODE_PROMPT}-token prompts, {N_DECODE_OUTPUT} tokens out, at rising concurrency until the knee",
    ("c*_decode_tokens_per_s", "plateau_decode_tokens_per_s", "knee_streams"),
    _decode,
)


# --- chat ---


async def _chat(endpoint: Endpoint, options: Options) -> WorkloadResult:
    """`chat` of `arrivals.toml`. The chats of the last seconds are waited for, too."""
    workload = built_in_files()["chat"].with_burstiness(options.burstiness).workload("chat")
    n_requests = options.rate_per_s * options.seconds
    sessions = [each for each in workload.sessions(math.ceil(n_requests), options.seed) if each.at < n_requests]
    turns = [turn for session in sessions for turn in session.turns]
    prompts = [numbers(options.seed, f"chat {index}", turn.n_prompt) for index, turn in enumerate(turns)]
    times_s = [session.at / options.rate_per_s for session in sessions]

    def begin(index: int, intended_at_s: float) -> Stream:
        return endpoint.begin(prompts[index], turns[index].n_output, intended_at_s=intended_at_s)

    start_s = time.perf_counter()
    records = await open_loop(times_s, begin)
    seconds = max(options.seconds, time.perf_counter() - start_s)
    limits = {"ttft_limit_s": options.ttft_limit_s, "itl_limit_s": options.itl_limit_s}
    metrics = stream_metrics("", records) | goodput("", records, seconds, **limits)
    metrics["send_delay_max_s"] = max((record.sent_at_s - record.intended_at_s for record in records), default=0.0)
    return WorkloadResult(
        metrics,
        {"rate_per_s": options.rate_per_s, "burstiness": options.burstiness, "seconds": options.seconds, **limits},
        "" if records else "no chat arrived in this time; a longer --seconds or a higher --rate brings some",
    )


CHAT = define(
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
    _chat,
)
