"""`python -m tests.soak --minutes 60 [--json FILE] [--picture FILE]`: everything at once, engines that die, and nothing
may be lost.

Two daemons at a time. One has fake engines, whose answers are a function of the request alone: every character of every
answer is compared with what it was before anything was killed. The other runs `tiny` in llama.cpp, where another batch
may round another way: every answer must come to its end, and nearly all must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.faults.postcondition import unharmed
from tests.hub.repository import Repository
from tests.hub.server import Hub
from tests.soak import load, watch
from tests.support.synthesis.synthesize import synthesize

N_CLIENTS = 5
# Of the answers of a real model so many may differ in rounding from those that were computed alone.
MAX_DIFFERING = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kill-every", type=float, metavar="SECONDS", help="default: 60, or a fifth of a short run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    every_s = arguments.kill_every or min(60.0, arguments.minutes * 60 / 5)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        other = Path(folder, "other.gguf")
        synthesize("tiny", "F16", other)
        runs = [
            pool.submit(run, other, arguments.minutes * 60, every_s, fake=fake, seed=seed)
            for seed, fake in enumerate((True, False), 1)
        ]
        reports = [each.result() for each in runs]
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n")
    if arguments.picture:
        arguments.picture.write_text(watch.picture(_series(reports)))
    problems = [f"{report['engines']}: {problem}" for report in reports for problem in report["problems"]]
    for report in reports:
        print(report["engines"], {name: value for name, value in report.items() if name not in ("samples", "engines")})
    print("\n".join(problems) or "soak: nothing was lost")
    return bool(problems)


def run(other: Path, seconds: float, every_s: float, *, fake: bool, seed: int) -> dict[str, Any]:
    """One daemon under load for so long. What happened, with what was wrong under `problems`."""
    repository = Repository("loopback/soak-GGUF", {"soak-F16.gguf": builtin.MODEL_PATH.read_bytes()})
    settings = {
        "LOCALRUN_FAKE_STEP_MS": "5",
        "LOCALRUN_RAM_CACHE": str(64 * watch.MIB),
        "LOCALRUN_DISK_CACHE": str(64 * watch.MIB),
    }
    with Hub(repository) as hub, running_daemon(fake=fake, HF_ENDPOINT=hub.endpoint, **settings) as daemon:
        answers = load.wanted(daemon)
        # Connections to the hub are kept from the first pull on.
        load.come_and_go(daemon.http, load.Books(), str(other), "loopback/soak-GGUF")
        books, stop = load.Books(), threading.Event()
        with unharmed(daemon), ThreadPoolExecutor(N_CLIENTS + 3) as pool:
            samples = pool.submit(watch.sample_until, daemon, stop)
            kills = pool.submit(watch.kill_until, daemon, every_s, seed, stop)
            others = [
                pool.submit(load.coming_and_going, daemon, books, str(other), "loopback/soak-GGUF", stop),
                *(pool.submit(load.client, daemon, books, answers, 100 * seed + n, stop) for n in range(N_CLIENTS)),
            ]
            time.sleep(seconds)
            stop.set()
            for each in others:
                each.result()
        return _report(daemon, books, samples.result(), kills.result(), fake=fake)


def _report(
    daemon: Daemon, books: load.Books, samples: list[watch.Sample], kills: list[str], *, fake: bool
) -> dict[str, Any]:
    growth = {field: watch.growth(samples, field) for field in watch.LEAST_GROWTH}
    n_compared = sum(books.ended[ask.__name__] for ask in load.ASKS)
    problems = [f"lost: {lost}" for lost in books.lost]
    if len(books.wrong) > (0 if fake else MAX_DIFFERING * n_compared):
        problems += [f"differs: {wrong}" for wrong in books.wrong]
    for field, (before, after) in growth.items():
        if not watch.is_flat(before, after, field):
            problems.append(f"{field} grew from {before:.0f} to {after:.0f}")
    if not kills:
        problems.append("no engine was killed")
    return {
        "engines": "fake" if fake else "llama.cpp",
        "ended": dict(books.ended),
        "lost": len(books.lost),
        "differing": len(books.wrong),
        "kills": kills,
        "resumed": _resumed(daemon),
        "growth": growth,
        "problems": problems,
        "samples": samples,
    }


def _resumed(daemon: Daemon) -> float:
    lines = daemon.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("localrun_requests_resumed_total"))


def _series(reports: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    series = {}
    for report in reports:
        samples = report["samples"]
        who = f"daemon with {report['engines']} engines"
        series[f"resident memory in MiB, {who}"] = [(each.at_s, each.rss_bytes / watch.MIB) for each in samples]
        series[f"descriptors, {who}"] = [(each.at_s, float(each.n_descriptors)) for each in samples]
    return series


if __name__ == "__main__":
    sys.exit(main())
