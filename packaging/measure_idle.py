#!/usr/bin/env python3
"""Measures what localrun costs while nobody uses it: `python packaging/measure_idle.py [--check] [--json FILE]`.

Start-up is from the start of the process to the first good answer of /health, and, in another round, to the first piece
of the built-in model's text; medians over rounds, each with a fresh daemon and folders of its own. Idle is one daemon
without a model, over `--seconds` after it has settled: resident memory at the end, and processor time as a share of one
core, of the daemon alone and with its children (the template worker). Run with the interpreter that has localrun.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

POLL_INTERVAL_S = 0.002
SETTLE_S = 3.0
TIMEOUT_S = 60.0
LIMITS = {"healthy_s": 1.0, "first_token_s": 2.0, "idle_rss_mb": 80.0, "idle_core_percent": 0.5}


@contextlib.contextmanager
def running_daemon() -> Iterator[tuple[psutil.Process, int, float]]:
    """The process, its port, and when it was started (`time.perf_counter`)."""
    with tempfile.TemporaryDirectory(prefix="localrun-idle-") as home, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LOCALRUN_")}
        environ |= {"LOCALRUN_HOME": home, "LOCALRUN_PORT": str(port), "HF_HOME": str(Path(home, "hf"))}
        started_s = time.perf_counter()
        process = psutil.Popen(
            [sys.executable, "-P", "-m", "localrun", "serve"], env=environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield process, port, started_s
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def wait_healthy(process: psutil.Process, port: int, started_s: float) -> float:
    """Seconds from the start to the first good answer."""
    while time.perf_counter() - started_s < TIMEOUT_S:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit("measure_idle: the daemon ended at once; run `localrun serve` to see why")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return time.perf_counter() - started_s
        except OSError:
            time.sleep(POLL_INTERVAL_S)
        finally:
            connection.close()
    raise SystemExit(f"measure_idle: the daemon did not answer within {TIMEOUT_S:g} s")


def first_token_s(port: int, started_s: float) -> float:
    """Seconds from the start to the first piece of text of `tiny`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    body = json.dumps({"model": "tiny", "prompt": "What is 3 + 4?", "options": {"num_predict": 4}})
    connection.request("POST", "/api/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    while line := response.readline():
        piece = json.loads(line)
        if "error" in piece:
            raise SystemExit(f"measure_idle: {piece['error']}")
        if piece.get("response"):
            seconds = time.perf_counter() - started_s
            connection.close()
            return seconds
    raise SystemExit("measure_idle: the answer ended without a token")


def processor_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def idle(process: psutil.Process, seconds: float) -> dict[str, float]:
    """Memory and processor share of a daemon that nobody asks anything, and of the children that it keeps: what it asks
    the kernels once, in a process of its own, is none of them."""
    time.sleep(SETTLE_S)
    began_s = time.perf_counter()
    before_s = {each: processor_s(each) for each in (process, *process.children(recursive=True))}
    time.sleep(seconds)
    elapsed_s = time.perf_counter() - began_s
    kept = {process, *process.children(recursive=True)} & before_s.keys()
    used_s = {each: processor_s(each) - before_s[each] for each in kept}
    return {
        "idle_rss_mb": process.memory_info().rss / 1e6,
        "idle_children_rss_mb": sum(each.memory_info().rss for each in kept - {process}) / 1e6,
        "idle_core_percent": 100 * used_s[process] / elapsed_s,
        "idle_with_children_core_percent": 100 * sum(used_s.values()) / elapsed_s,
    }


def measure(rounds: int, seconds: float) -> dict[str, float]:
    healthy, first = [], []
    for _ in range(rounds):
        with running_daemon() as (process, port, started_s):
            healthy.append(wait_healthy(process, port, started_s))
            first.append(first_token_s(port, started_s))
    with running_daemon() as (process, port, started_s):
        wait_healthy(process, port, started_s)
        at_rest = idle(process, seconds)
    return {
        "healthy_s": statistics.median(healthy),
        "healthy_worst_s": max(healthy),
        "first_token_s": statistics.median(first),
        "first_token_worst_s": max(first),
        **at_rest,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="daemons started for the start-up figures (default 5)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the idle time (default 30)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a figure is over its limit")
    args = parser.parse_args(argv)
    figures: dict[str, Any] = {name: round(value, 3) for name, value in measure(args.rounds, args.seconds).items()}
    over = [name for name, limit in LIMITS.items() if figures[name] > limit]
    for name, value in figures.items():
        limit = f"  (limit {LIMITS[name]:g}{', OVER' if name in over else ''})" if name in LIMITS else ""
        print(f"{name:<34}{value:>10.3f}{limit}")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "limits": LIMITS, "over": over}, indent=2) + "\n")
    return 1 if args.check and over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
