"""Hog and mouse: one client keeps the server full, another asks for little now and then."""

from __future__ import annotations

import asyncio
import time

from localrun.bench.metrics import service_by_client, summary
from localrun.bench.results import Options
from localrun.bench.streams import Endpoint, Stream, numbers, open_loop
from localrun.bench.workloads.workload import Measured, define

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


async def measure(endpoint: Endpoint, options: Options) -> Measured:
    """The mouse asks alone first; then at fixed times, from when the hog's first answers flow."""

    def mouse(index: int, group: str, intended_at_s: float | None = None) -> Stream:
        prompt = numbers(options.seed, f"mouse {group} {index}", N_MOUSE_PROMPT)
        return endpoint.begin(prompt, N_MOUSE_OUTPUT, group=group, client=MOUSE, intended_at_s=intended_at_s)

    alone = [await mouse(index, "alone").task for index in range(N_ALONE)]
    hog = [asyncio.create_task(_hog(endpoint, options.seed, index)) for index in range(N_HOG_STREAMS)]
    try:
        await endpoint.until(lambda: _has_begun(endpoint), options.request_timeout_s)
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
    return Measured(
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


def _has_begun(endpoint: Endpoint) -> bool:
    return any(record.client == HOG and len(record.arrivals_s) >= STEADY_PIECES for record in endpoint.records)


WORKLOAD = define(
    "fairness",
    f"a hog with {N_HOG_STREAMS} long requests at all times, and a mouse with a short one now and then",
    ("mouse_ttft_p50_s", "mouse_ttft_max_s", "mouse_latency_p50_s", "mouse_latency_max_s", "mouse_slowdown",
     "hog_service_per_s"),
    measure,
)  # fmt: skip
