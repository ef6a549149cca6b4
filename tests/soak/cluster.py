"""`python -m tests.soak.cluster --minutes 60 [--kill-every SECONDS]`: the soak's clients on two doors of a cluster of
three nodes on this machine, while replicas and a node are killed, hang and come back, and nothing may be lost.

Engines are fake, so every character of every answer is compared with what it was before anything was killed. Both doors
are watched as the soak's daemons are: what they hold must not grow.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from localrun.models import builtin
from tests.cluster.test_three_nodes import Cluster
from tests.soak import load, watch

N_CLIENTS = 4  # of each door
MODEL = "tiny"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.cluster", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kill-every", type=float, metavar="SECONDS", help="default: 30, or a tenth of a short run")
    arguments = parser.parse_args()
    seconds = arguments.minutes * 60
    with tempfile.TemporaryDirectory(prefix="lr") as folder:
        models = Path(folder, "models")
        models.mkdir()
        Path(models, f"{MODEL}.gguf").symlink_to(builtin.MODEL_PATH)
        cluster = Cluster(Path(folder), models, "127.0.0.1", "127.0.0.2", "127.0.0.3")
        try:
            cluster.start()
            cluster.head.run("deploy", MODEL, "--replicas", "3")
            cluster.ready(MODEL, 3)
            problems = run(cluster, seconds, arguments.kill_every or min(30.0, seconds / 10))
        finally:
            cluster.stop()
    print("\n".join(problems) or "soak: nothing was lost")
    return bool(problems)


def run(cluster: Cluster, seconds: float, every_s: float) -> list[str]:
    """What was wrong."""
    doors = (cluster.head, cluster.second)
    answers = load.wanted(cluster.head)
    books, stop = load.Books(), threading.Event()
    with ThreadPoolExecutor(len(doors) * (N_CLIENTS + 1) + 1) as pool:
        samples = [pool.submit(watch.sample_until, door, stop) for door in doors]
        killing = pool.submit(kill_until, cluster, every_s, stop)
        clients = [
            pool.submit(load.client, door, books, answers, 100 * at + n, stop)
            for at, door in enumerate(doors)
            for n in range(N_CLIENTS)
        ]
        time.sleep(seconds)
        stop.set()
        for each in clients:
            each.result()
        kills = killing.result()
        problems = [f"lost: {lost}" for lost in books.lost] + [f"differs: {wrong}" for wrong in books.wrong]
        for door, taken in zip(doors, samples, strict=True):
            growth = {field: watch.growth(taken.result(), field) for field in watch.LEAST_GROWTH}
            problems += [
                f"{field} of the door of {door.name} grew from {before:.0f} to {after:.0f}"
                for field, (before, after) in growth.items()
                if not watch.is_flat(before, after, field)
            ]
    if not kills:
        problems.append("nothing was killed")
    print({"ended": dict(books.ended), "lost": len(books.lost), "differing": len(books.wrong), "kills": kills})
    return problems


def kill_until(cluster: Cluster, every_s: float, stop: threading.Event) -> list[str]:
    """Ends a replica, its engine, or the node without a door, or makes a replica hang. What was done, in words."""
    drawn, done = random.Random(1), list[str]()
    while not stop.wait(every_s):
        replicas = [one for app in cluster.now()["apps"] for one in app["replicas"] if not one["why_not"]]
        if not replicas:
            continue
        replica, how = drawn.choice(replicas), drawn.choice(["replica", "engine", "hang", "node"])
        process = psutil.Process(replica["pid"])
        if how == "node":
            cluster.third.kill()
            cluster.join(cluster.third)
        elif how == "engine":
            for engine in process.children():
                engine.kill()
        elif how == "hang":
            process.suspend()
            stop.wait(5)
            process.kill()
        else:
            os.kill(process.pid, signal.SIGKILL)
        done.append(f"{how} on {replica['node'] if how != 'node' else cluster.third.name}")
        cluster.ready(MODEL, 2)
    return done


if __name__ == "__main__":
    sys.exit(main())
