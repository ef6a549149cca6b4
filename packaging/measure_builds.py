"""Compares builds of llama.cpp here: a prompt of 512 tokens, and decoding 1, 4 and 8 streams, in bare loops.

    python packaging/measure_builds.py --model FILE.gguf NAME=FOLDER NAME=FOLDER...

A folder holds an unpacked wheel of llama-cpp-python. Builds alternate, each run in a process of its own; medians are
printed as a table. Needs a quiet machine and an environment with localrun.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

STREAMS = (1, 4, 8)
N_PROMPT, N_OUTPUT = 512, 96


def measure(model: str) -> dict[str, float]:
    """Tokens per second of each workload, with the library that this process has loaded."""
    from bench.bare_loop import decode_rate
    from localrun.engine.native.llama import LlamaBackend
    from localrun.hardware.processors import usable

    backend = LlamaBackend(
        model, n_cells=4096, n_seqs=max(STREAMS), n_batch=N_PROMPT, n_threads=usable().usual_threads, n_gpu_layers=0,
        kv_type="f16",
    )  # fmt: skip
    rates = {}
    for name in ("warm", f"prompt of {N_PROMPT}"):
        backend.batch.token[:N_PROMPT] = [at * 17 % 256 + 3 for at in range(N_PROMPT)]
        backend.batch.pos[:N_PROMPT] = range(N_PROMPT)
        backend.batch.seq[:N_PROMPT] = 0
        backend.batch.wants_logits[:N_PROMPT] = 0
        backend.batch.wants_logits[N_PROMPT - 1] = 1
        started_at_s = time.perf_counter()
        backend.decode(N_PROMPT)
        rates[name] = N_PROMPT / (time.perf_counter() - started_at_s)
        backend.seq_remove(0, 0)
    for n_streams in STREAMS:
        rates[f"decode {n_streams}"] = decode_rate(backend, n_streams, 50, N_OUTPUT)
    backend.close()
    del rates["warm"]
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not args.builds:
        print(json.dumps(measure(args.model)))
        return
    folders = dict(build.split("=", 1) for build in args.builds)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(args.rounds):
        for name, folder in folders.items():
            command = [sys.executable, __file__, "--model", args.model]
            ran = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": folder}, check=True, capture_output=True, text=True
            )
            found[name].append(json.loads(ran.stdout.splitlines()[-1]))
    workloads = list(next(iter(found.values()))[0])
    print("| build |", " | ".join(workloads), "|")
    print("|---" * (len(workloads) + 1) + "|")
    for name, runs in found.items():
        cells = []
        for workload in workloads:
            rates = sorted(run[workload] for run in runs)
            cells.append(f"{statistics.median(rates):.0f} ({rates[0]:.0f}-{rates[-1]:.0f})")
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
