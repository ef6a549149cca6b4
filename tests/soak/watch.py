"""What is measured while the load runs, what kills engines meanwhile, and the picture of it."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from typing import NamedTuple

import httpx2
import psutil

from tests.daemon import Daemon

SAMPLE_EVERY_S = 2.0
MIB = 1024 * 1024


class Sample(NamedTuple):
    """What the daemon's process holds at a time, and how many processes it has."""

    at_s: float
    rss_bytes: int
    n_descriptors: int
    n_threads: int
    n_children: int


def sample_until(daemon: Daemon, stop: threading.Event) -> list[Sample]:
    """One every `SAMPLE_EVERY_S`."""
    process = psutil.Process(daemon.process.pid)
    began_s = time.monotonic()
    samples = []
    while not stop.wait(SAMPLE_EVERY_S):
        with process.oneshot():
            rss_bytes, n_threads = process.memory_info().rss, process.num_threads()
        held = (process.num_fds(), n_threads, len(process.children(recursive=True)))
        samples.append(Sample(time.monotonic() - began_s, rss_bytes, *held))
    return samples


def kill_until(daemon: Daemon, every_s: float, seed: int, stop: threading.Event) -> list[str]:
    """Ends an engine that is computing, every so often and in every way. What was done, in words."""
    drawn = random.Random(seed)
    done = []
    with httpx2.Client(base_url=daemon.url, timeout=60, trust_env=False) as http:
        while not stop.wait(every_s):
            engines = http.get("/localrun/v1/snapshot").json()["engines"]
            busy = [engine for engine in engines if engine["state"] == "ready" and engine["slots_busy"]]
            if not busy:
                continue
            engine = drawn.choice(busy)
            how = drawn.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
            os.kill(engine["pid"], how)
            done.append(f"{how.name} with {engine['slots_busy']} running")
    return done


# What is held may grow by so much: pools of threads and connections fill up one by one.
MAX_GROWTH = 0.15
LEAST_GROWTH = {"rss_bytes": 16 * MIB, "n_descriptors": 8, "n_threads": 8}


def growth(samples: list[Sample], field: str) -> tuple[float, float]:
    """The medians of the second quarter and of the last one: the first one is spent on warming up."""
    values = [float(getattr(sample, field)) for sample in samples]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[quarter : 2 * quarter] or values), statistics.median(values[-quarter:])


def is_flat(before: float, after: float, field: str) -> bool:
    return after - before <= max(MAX_GROWTH * before, LEAST_GROWTH[field])


WIDTH, HEIGHT = 760, 160


def picture(series: dict[str, list[tuple[float, float]]]) -> str:
    """Lines over time, one below the other, as SVG: label -> points (seconds, value)."""
    parts = []
    for number, (label, points) in enumerate(series.items()):
        top = number * (HEIGHT + 40)
        last_s, most = max(point[0] for point in points), max(point[1] for point in points) * 1.1 or 1.0
        line = " ".join(
            f"{60 + s / last_s * (WIDTH - 80):.1f},{top + 30 + HEIGHT * (1 - v / most):.1f}" for s, v in points
        )
        parts += [
            f'<text x="60" y="{top + 20}">{label}</text>',
            f'<text x="52" y="{top + 40}" text-anchor="end">{most:.0f}</text>',
            f'<text x="52" y="{top + 30 + HEIGHT}" text-anchor="end">0</text>',
            f'<text x="{WIDTH - 20}" y="{top + 20}" text-anchor="end">{last_s / 60:.0f} minutes</text>',
            f'<path d="M60 {top + 30}V{top + 30 + HEIGHT}H{WIDTH - 20}" fill="none" stroke="#888"/>',
            f'<polyline points="{line}" fill="none" stroke="#2b6cb0" stroke-width="1.5"/>',
        ]
    height = len(series) * (HEIGHT + 40) + 10
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>\n"])
