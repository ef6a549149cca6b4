"""What llama.cpp is asked to do once, in a process of its own: `python -m localrun.engine.tools.tasks`, and one of

    build_report [--gpus]
    quantize SOURCE TARGET FILE_TYPE N_THREADS
    thread_rates MODEL ROUNDS STREAMS THREADS
    device_check MODEL

The daemon and the command line start them, and do not load the native library themselves: it may not load at all, and a
damaged file or a driver may end the process it runs in. What is found is JSON lines on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any, TextIO

from localrun.engine.tools import own_stdout, say
from localrun.errors import LocalrunError
from localrun.processes import step_back

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localrun.engine.native.context import LlamaContext


def main() -> int:
    """The exit code. The native library is imported by the task, when what it prints does not go to stdout any more,
    and so is what takes long to import: the daemon asks for the GPUs each time that it loads a model."""
    lines, (name, *args) = own_stdout(), sys.argv[1:]
    tasks = {task.__name__: task for task in (build_report, quantize, thread_rates, device_check)}
    return tasks[name](args, lines)


# --- what this build of llama.cpp is and can use ---


def build_report(args: list[str], lines: TextIO) -> int:
    """One object: `version` of the bindings, `ggml`, `library`, `backends`, `modules` (files of backends that were
    opened for this processor) and `skipped` ones with the reason, `gpu_offload`, `cpu_features`, and `devices` as lists
    of `[name, free_bytes, is_shared, total_bytes]`. With `--gpus` the devices alone."""
    from localrun.engine.native import library
    from localrun.engine.native.library import bound, native

    devices = library.gpus()
    if args == ["--gpus"]:
        lines.write(json.dumps(devices) + "\n")
        return 0
    say(
        lines,
        version=importlib.metadata.version("llama-cpp-python"),
        ggml=bound("ggml_version", ctypes.c_char_p)().decode() if hasattr(library.ggml(), "ggml_version") else "",
        library=str(library.library_folder()),
        backends=library.backend_names(),
        modules=library.loaded_modules,
        skipped=library.skipped_modules(),
        gpu_offload=bool(native.llama_supports_gpu_offload()),
        cpu_features=cpu_features(native.llama_print_system_info().decode()),
        devices=devices,
    )
    return 0


def cpu_features(system_info: str) -> list[str]:
    """The names that llama.cpp's line about itself sets to 1 for the CPU: `CPU : AVX = 1 | AVX2 = 1 | ...`."""
    _, _, of_cpu = system_info.rpartition("CPU : ")
    pairs = (pair.partition("=") for pair in of_cpu.split("|"))
    return [name.strip() for name, _, value in pairs if value.strip() == "1"]


# --- a model file in another quantization ---

_NICENESS = 10
# The quantizer's own words for a tensor: "[  12/ 291]  blk.1.ffn_up.weight - [ 576, 1536, 1, 1], ...".
_TENSOR = re.compile(rb"^\[\s*(\d+)/\s*(\d+)\]")


def quantize(args: list[str], lines: TextIO) -> int:
    """`FILE_TYPE` is a number of llama.cpp's `llama_ftype`. Each tensor that is done is a line, `{"done": 3, "total":
    291}`; a failure is `{"error": "..."}` and exit code 1. It ends when its stdin closes, so that it does not outlive
    the daemon, and it is polite: streams that run meanwhile go first. A target that was not finished is for the caller
    to delete."""
    from localrun.engine.native.library import last_problem, log_callback, native
    from localrun.hardware.processors import usable

    source, target, file_type, n_threads = args
    source, target = os.path.abspath(source), os.path.abspath(target)
    # llama.cpp opens what it writes by a name in the system's code page, which on Windows lacks most folders' letters.
    os.chdir(os.path.dirname(target))
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    step_back(_NICENESS)

    def take_log_line(level: int, text: bytes, data: object) -> None:
        tensor = _TENSOR.match(text)
        if tensor is not None:
            say(lines, done=int(tensor[1]), total=int(tensor[2]))
        else:
            log_callback(level, text, data)

    callback = native.llama_log_callback(take_log_line)
    native.llama_log_set(callback, None)
    native.llama_backend_init()
    params = native.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.nthread = int(n_threads) or usable().most_threads
    problem = native.llama_model_quantize(os.fsencode(source), os.fsencode(os.path.basename(target)), params)
    if problem:
        say(lines, error=last_problem())
    sys.stderr.flush()
    # At once: a parent that closes stdin as soon as stdout ends must not turn a good end into a bad one.
    os._exit(1 if problem else 0)


def _leave_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os._exit(1)


# --- how fast a model is with each number of threads ---

_PROMPT_ROWS = 512
# Of each measurement of streams: as many steps as fit, within bounds.
_STREAMS_S = 1.0
_LEAST_STEPS, _MOST_STEPS = 4, 64


def thread_rates(args: list[str], lines: TextIO) -> int:
    """What `localrun bench tune` runs; numbers of streams and of threads are divided by commas.

    The first line is `{"build": ...}`, the name that the library has in `threads.json`; then comes one for each
    measurement, `{"threads", "streams", "rows", "seconds"}`: the mean time of a step, pauses by a quota included, with
    so many rows for each of so many streams; and at the end `{"others"}`, how many processors other programs took
    meanwhile. Every other round goes through the numbers backwards."""
    from localrun.engine.cache.disk_files import library_build
    from localrun.engine.native.library import library_folder
    from localrun.engine.native.llama import LlamaBackend
    from localrun.engine.native.threads import step_s
    from localrun.hardware.processors import others_busy_s
    from localrun.hardware.thread_choice import Threads

    model, rounds, *numbers = args
    streams, threads = ([int(number) for number in text.split(",")] for text in numbers)
    try:
        backend = LlamaBackend(
            model, n_cells=256, n_seqs=1, n_batch=32, n_threads=1, n_gpu_layers=0, kv_type="f16", may_split=False
        )
    except LocalrunError as error:
        print(error.message, file=sys.stderr)
        return 1
    say(lines, build=library_build("llama-cpp-python", library_folder()))
    n_seqs = max(streams)
    n_cells = _PROMPT_ROWS + n_seqs * (_MOST_STEPS + 1)
    began_s, others_s = time.perf_counter(), others_busy_s()
    with backend.measured_context(max(threads), n_cells=n_cells, n_seqs=n_seqs, n_batch=_PROMPT_ROWS) as context:

        def measure(n_threads: int, n_streams: int, n_rows: int, n_steps: int = 1) -> None:
            seconds = step_s(context, time.perf_counter, n_seqs=n_streams, n_each=n_rows, n_steps=n_steps)
            say(lines, threads=n_threads, streams=n_streams, rows=n_rows, seconds=statistics.mean(seconds))

        for index in range(int(rounds)):
            for n_threads in threads[:: -1 if index % 2 else 1]:
                context.set_threads(Threads(n_threads, n_threads))
                (first_s,) = step_s(context, time.perf_counter, n_seqs=1, n_each=1)  # wakes the threads
                n_steps = max(_LEAST_STEPS, min(_MOST_STEPS, int(_STREAMS_S / first_s)))
                for n_streams in streams:
                    measure(n_threads, n_streams, 1, n_steps)
                measure(n_threads, 1, _PROMPT_ROWS)
    say(lines, others=max(0.0, others_busy_s() - others_s) / (time.perf_counter() - began_s))
    backend.close()
    return 0


# --- whether each GPU computes what the CPU does ---

_TOLERANCE = 0.05
_N_STREAMS = 3
# Which streams have rows, step by step. A context plans its memory for the first of them, and keeps the plan while
# others have as many rows; so each pair is the first one once, and all streams together come last.
_PAIRS = list(combinations(range(_N_STREAMS), 2))
_ALONE = [(seq,) for seq in range(_N_STREAMS)]
_ROUNDS = [[first, *_PAIRS, *_ALONE, *_PAIRS, tuple(range(_N_STREAMS))] for first in _PAIRS]


def device_check(args: list[str], lines: TextIO) -> int:
    """Computes streams on each GPU and on the CPU, and says how many rows are not the same; started by the doctor.

    The lines have the GPU's place in the list, for two may have one name: `{"number": 0, "device": "..."}` before each
    GPU is tried, and `{"number": 0, "device": "...", "n_rows": 60, "n_wrong": 0}` after it. A crash ends the process,
    and the last line says where.

    What is compared is what engines use of a device: the likeliest token of every stream, found where the logits were
    computed, while other streams have rows at each step. It is wrong if it is none (negative), or far from being the
    likeliest on the CPU: by more than `_TOLERANCE` of the range of the row's logits. Rounding on devices was seen to
    make a hundredth of it."""
    from localrun.engine.native.library import gpu_devices, gpus, log_callback, native
    from localrun.engine.native.model import load_model

    (path,) = args
    native.llama_log_set(log_callback, None)
    names = [name for name, *_ in gpus()]
    for number, (name, device) in enumerate(zip(names, gpu_devices(), strict=True)):
        of_device: dict[str, object] = {"number": number, "device": name}
        say(lines, **of_device)
        there, here = load_model(path, -1, devices=(device,)), load_model(path, 0)
        wrong = [
            token < 0 or bool(logits.max() - logits[token] > _TOLERANCE * (logits.max() - logits.min()))
            for steps in _ROUNDS
            for token, logits in _compared(there, here, steps)
        ]
        say(lines, **of_device, n_rows=len(wrong), n_wrong=sum(wrong))
    return 0


def _compared(there: Any, here: Any, steps: list[tuple[int, ...]]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Of each row: the token of the model on the device, and the logits of the one on the CPU."""
    on_device, on_cpu = _opened(there, is_device=True), _opened(here, is_device=False)
    lengths = [0] * _N_STREAMS
    for number, seqs in enumerate(steps):
        for context in (on_device, on_cpu):
            for row, seq in enumerate(seqs):
                batch = context.batch
                batch.token[row] = (number * 31 + seq * 7) * 37 % context.n_vocab
                batch.pos[row], batch.seq[row], batch.wants_logits[row] = lengths[seq], seq, 1
            context.decode(len(seqs))
        for row, seq in enumerate(seqs):
            lengths[seq] += 1
            yield on_device.likeliest(row), on_cpu.logits(row)
    on_device.close()
    on_cpu.close()


def _opened(model: Any, *, is_device: bool) -> LlamaContext:
    from localrun.engine.backend import MemoryKind
    from localrun.engine.native.context import ContextShape, LlamaContext
    from localrun.engine.native.library import Threadpools, native

    n_vocab = int(native.llama_vocab_n_tokens(native.llama_model_get_vocab(model)))
    # Rows of drafts besides, as engines have them: without, llama.cpp lays out memory in another way.
    shape = ContextShape(256, _N_STREAMS, 64, 1, "f16", is_split=False, n_draft_rows=8, samples_on_device=is_device)
    return LlamaContext(model, shape, Threadpools(), kind=MemoryKind.ATTENTION, n_window=0, n_vocab=n_vocab)


if __name__ == "__main__":
    sys.exit(main())
