"""How fast a model is with each number of threads.

`python -m localrun.engine.tools.thread_rates MODEL --threads 1 2 4`: what `localrun bench tune` runs. The first line on
stdout is `{"build": ...}`, the name that the library has in `threads.json`; then comes one for each measurement,
`{"threads", "streams", "rows", "seconds"}`: the mean time of a step, pauses by a quota included, with so many rows for
each of so many streams; and at the end `{"others"}`, how many processors other programs took meanwhile. Every other
round goes through the numbers backwards. A process of its own, because loading the native library is for engines alone.

Does not: sample, or choose.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import msgspec

from localrun.engine.cache.disk_files import library_build
from localrun.engine.native.library import library_folder
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.native.threads import step_s
from localrun.errors import LocalrunError
from localrun.hardware.processors import others_busy_s
from localrun.hardware.thread_choice import Threads

PROMPT_ROWS = 512
# Of each measurement of streams: as many steps as fit, within bounds.
STREAMS_S = 1.0
LEAST_STEPS, MOST_STEPS = 4, 64


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m localrun.engine.tools.thread_rates", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, nargs="+", required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    n_seqs, n_most = max(args.streams), max(args.threads)
    try:
        backend = LlamaBackend(
            args.model, n_cells=256, n_seqs=1, n_batch=32, n_threads=1, n_gpu_layers=0, kv_type="f16", may_split=False
        )
    except LocalrunError as error:
        print(error.message, file=sys.stderr)
        return 1
    _print({"build": library_build("llama-cpp-python", library_folder())})
    n_cells = PROMPT_ROWS + n_seqs * (MOST_STEPS + 1)
    began_s, others_s = time.perf_counter(), others_busy_s()
    with backend.measured_context(n_most, n_cells=n_cells, n_seqs=n_seqs, n_batch=PROMPT_ROWS) as context:
        for index in range(args.rounds):
            for n_threads in args.threads[:: -1 if index % 2 else 1]:
                context.set_threads(Threads(n_threads, n_threads))
                (first_s,) = step_s(context, time.perf_counter, n_seqs=1, n_each=1)  # wakes the threads
                n_steps = max(LEAST_STEPS, min(MOST_STEPS, int(STREAMS_S / first_s)))
                for n_streams in args.streams:
                    seconds = step_s(context, time.perf_counter, n_seqs=n_streams, n_each=1, n_steps=n_steps)
                    _print(_row(n_threads, n_streams, 1, seconds))
                seconds = step_s(context, time.perf_counter, n_seqs=1, n_each=PROMPT_ROWS)
                _print(_row(n_threads, 1, PROMPT_ROWS, seconds))
    _print({"others": max(0.0, others_busy_s() - others_s) / (time.perf_counter() - began_s)})
    backend.close()
    return 0


def _row(n_threads: int, n_streams: int, n_rows: int, seconds: list[float]) -> dict[str, object]:
    return {"threads": n_threads, "streams": n_streams, "rows": n_rows, "seconds": statistics.mean(seconds)}


def _print(row: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(row) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
