"""How much a server gets done on short prompts.

`decode`: 128 tokens out at rising concurrency: the decode curve, its knee and its plateau. `chat`: chats that arrive by
themselves, in an open loop: how many are answered as fast as a person wants. And when several clients want more than it
can do: `fairness`, hog and mouse: one client keeps the server full, another asks for little now and then. `overload`:
many requests at once, then arrivals at twice the rate at which it worked them off.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from localrun.bench.arrivals import built_in_files
from localrun.bench.metrics import (
    contended_until_s,
    difference_bound_tokens,
    goodput,
    jain_index,
    knee,
    lowest_share,
    outcomes,
    service_by_client,
    stream_metrics,
    summary,
)
from localrun.bench.results import Metrics, Options, StreamRecord
from localrun.bench.session import WorkloadResult, define
from localrun.bench.streams import CUT_SHORT, Endpoint, Stream, arrivals_s, numbers, open_loop

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
    ("goodput_requests_per_s", "goodput_ratio", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "longest_gap_s",
     "wall_s"),
    _chat,
)  # fmt: skip


# --- fairness ---

HOG, MOUSE = "hog", "mouse"
N_HOG_STREAMS = 16
N_HOG_PROMPT = 200
N_HOG_OUTPUT = 256
N_MOUSE_PROMPT = 50
N_MOUSE_OUTPUT = 16
N_ALONE = 3
MOUSE_INTERVAL_S = 2.0
STEADY_PIECES = 8
# Before it tries again after a refusal that did not say how long.
HOG_PAUSE_S = 1.0


async def _fairness(endpoint: Endpoint, options: Options) -> WorkloadResult:
    """The mouse asks alone first; then at fixed times, from when the hog's first answers flow."""

    def mouse(index: int, group: str, intended_at_s: float | None = None) -> Stream:
        prompt = numbers(options.seed, f"mouse {group} {index}", N_MOUSE_PROMPT)
        return endpoint.begin(prompt, N_MOUSE_OUTPUT, group=group, client=MOUSE, intended_at_s=intended_at_s)

    alone = [await mouse(index, "alone").task for index in range(N_ALONE)]
    hog = [asyncio.create_task(_hog(endpoint, options.seed, index)) for index in range(N_HOG_STREAMS)]
    try:
        await endpoint.until(
            lambda: any(each.client == HOG and len(each.arrivals_s) >= STEADY_PIECES for each in endpoint.records),
            options.request_timeout_s,
        )
        start_s = time.perf_counter()
        times_s = [MOUSE_INTERVAL_S * index for index in range(max(1, int(options.seconds / MOUSE_INTERVAL_S)))]
        records = await open_loop(times_s, lambda index, at_s: mouse(index, "beside", at_s))
        end_s = time.perf_counter()
    finally:
        for task in hog:
            task.cancel()
        await asyncio.gather(*hog, return_exceptions=True)
    done = [record for record in records if record.is_complete]
    metrics = summary("mouse_ttft", (record.ttft_s for record in done))
    metrics |= summary("mouse_latency", (record.latency_s for record in done))
    metrics |= summary("mouse_alone_latency", (record.latency_s for record in alone if record.is_complete))
    if done and "mouse_alone_latency_p50_s" in metrics:
        metrics["mouse_slowdown"] = metrics["mouse_latency_p50_s"] / metrics["mouse_alone_latency_p50_s"]
    started, ended = (service_by_client(endpoint.records, at_s) for at_s in (start_s, end_s))
    service = {client: ended[client] - started[client] for client in ended}
    metrics["hog_service_per_s"] = service[HOG] / (end_s - start_s)
    metrics["mouse_service_share"] = service[MOUSE] / sum(service.values()) if any(service.values()) else 0.0
    return WorkloadResult(
        metrics,
        {"n_hog_streams": N_HOG_STREAMS, "n_hog_prompt": N_HOG_PROMPT, "n_hog_output": N_HOG_OUTPUT,
         "n_mouse_prompt": N_MOUSE_PROMPT, "n_mouse_output": N_MOUSE_OUTPUT, "mouse_interval_s": MOUSE_INTERVAL_S,
         "seconds": options.seconds},
    )  # fmt: skip


async def _hog(endpoint: Endpoint, seed: int, index: int) -> None:
    """One of the hog's streams, for ever: the next request follows the end of the one before."""
    n_sent = 0
    while True:
        prompt = numbers(seed, f"hog {index} {n_sent}", N_HOG_PROMPT)
        record = await endpoint.send(prompt, N_HOG_OUTPUT, group="hog", client=HOG)
        n_sent += 1
        if not record.is_complete:
            await asyncio.sleep(record.retry_after_s or HOG_PAUSE_S)


FAIRNESS = define(
    "fairness",
    f"a hog with {N_HOG_STREAMS} long requests at all times, and a mouse with a short one now and then",
    ("mouse_ttft_p50_s", "mouse_ttft_max_s", "mouse_latency_p50_s", "mouse_latency_max_s", "mouse_slowdown",
     "hog_service_per_s"),
    _fairness,
)  # fmt: skip


# --- overload ---

# The first asks for more than the others together. The burst comes client by client, so a server that goes by arrival
# alone serves the greedy one first.
N_BY_CLIENT = {"greedy": 40, "b": 8, "c": 8, "d": 8}
N_PROMPT = 200
N_OUTPUT = 64
MULTIPLE = 2.0
# Enough to see a queue grow on the fastest machine.
MAX_ARRIVALS = 2000


async def _overload(endpoint: Endpoint, options: Options) -> WorkloadResult:
    def begin(part: str, index: int, client: str, intended_at_s: float | None = None) -> Stream:
        prompt = numbers(options.seed, f"overload {part} {index}", N_PROMPT)
        return endpoint.begin(prompt, N_OUTPUT, group=part, client=client, intended_at_s=intended_at_s)

    clients = [client for client, count in N_BY_CLIENT.items() for _ in range(count)]
    burst = [begin("burst", index, client) for index, client in enumerate(clients)]
    records = await asyncio.gather(*(stream.task for stream in burst))
    metrics = _of_part("burst", records) | _shares(records, options.slots)
    measured = WorkloadResult(
        metrics, {"n_burst": len(clients), "n_clients": len(N_BY_CLIENT), "n_prompt": N_PROMPT, "n_output": N_OUTPUT}
    )
    n_complete = sum(record.is_complete for record in records)
    if not n_complete:
        measured.note = "no request of the burst completed, so there is no rate to double"
        return measured
    rate_per_s = MULTIPLE * n_complete / metrics["burst_wall_s"]
    times_s = arrivals_s(rate_per_s=rate_per_s, seconds=options.seconds, seed=options.seed)[:MAX_ARRIVALS]
    arrived = await open_loop(times_s, lambda index, at_s: begin("open", index, clients[index % len(clients)], at_s))
    measured.parameters |= {"open_rate_per_s": rate_per_s, "open_seconds": options.seconds, "n_open": len(times_s)}
    measured.metrics |= _of_part("open", arrived)
    return measured


def _of_part(part: str, records: Sequence[StreamRecord]) -> Metrics:
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


OVERLOAD = define(
    "overload",
    f"{sum(N_BY_CLIENT.values())} requests at once from {len(N_BY_CLIENT)} clients, then {MULTIPLE:g} times that rate",
    ("burst_wall_s", "burst_completion_ratio", "burst_refused_count", "burst_failed_count", "burst_longest_wait_s",
     "burst_lowest_share_ratio", "burst_difference_of_bound", "open_completion_ratio", "open_refused_count",
     "open_failed_count", "open_longest_wait_s"),
    _overload,
    overloads=True,
)  # fmt: skip
