"""Computes small models with plain and with quick kernels, and says how far apart they are.

`python -m localrun.engine.tools.probe N_THREADS`, started by `localrun.doctor.kernel_probe`. stdin has the path of a
model file on each line, and behind a tab that of a file with the same weights as F32, if there is one. stdout has JSON
lines, all with the `case`, which is the number of the file: `{"case": 3, "path": "plain"}` and `{"case": 3, "path":
"quick"}` before each computation, then `{"case": 3, "difference": 0.0, "buffers": [...]}`, with `plain_error` and
`quick_error`, the differences from F32, where that is known; `{"case": 3, "signal": 11}` when it died, and `{"case": 3,
"error": "..."}` when llama.cpp refused. Where a process can be forked cheaply each case is a child of its own; else a
crash ends this process, and the last line says where it was.

A prompt of 70 rows fills tiles of 32 and groups of four and leaves a rest of both; then come nine rows, and single ones
as in decoding. `difference` is that of the row which differs most: its root mean square, over that of the plain logits.

Does not: judge the difference, or use a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from localrun.engine.native.library import native
from localrun.engine.tools import own_stdout, say

BATCHES = (70, 9, 1, 1, 1)
N_CELLS = 128
# Said by llama.cpp when it loads: "load_tensors:   CPU_REPACK model buffer size =    0.15 MiB".
_BUFFER_LINE = b" model buffer size"
_PLAIN_BUFFERS = frozenset({"CPU", "CPU_Mapped"})
# Where nothing else runs in this process when it forks. macOS' own libraries do not survive it.
_CAN_FORK = sys.platform == "linux"

_log_lines: list[bytes] = []


def main(n_threads: int) -> int:
    """Exit code 0 when every case was tried."""
    lines = own_stdout()
    _leave_no_core()
    for case, line in enumerate(sys.stdin.read().splitlines()):
        path, _, reference = line.partition("\t")
        if not _CAN_FORK:
            _try_case(case, path, reference, n_threads, lines)
            continue
        pid = os.fork()
        if pid == 0:
            _try_case(case, path, reference, n_threads, lines)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            say(lines, case=case, signal=os.WTERMSIG(status))
    return 0


def _try_case(case: int, path: str, reference: str, n_threads: int, lines: TextIO) -> None:
    try:
        native.llama_log_set(_log_callback, None)
        native.llama_backend_init()
        say(lines, case=case, path="plain")
        plain, _ = _logits(path, n_threads, is_quick=False)
        say(lines, case=case, path="quick")
        quick, buffers = _logits(path, n_threads, is_quick=True)
        errors = {}
        if reference:
            right, _ = _logits(reference, n_threads, is_quick=False)
            errors = {"plain_error": difference(right, plain), "quick_error": difference(right, quick)}
        say(lines, case=case, difference=difference(plain, quick), buffers=buffers, **errors)
    except Exception as error:
        say(lines, case=case, error=str(error))


def difference(plain: NDArray[np.float32], quick: NDArray[np.float32]) -> float:
    """See the module. -1 for NaN and infinity, which JSON cannot say."""
    sizes = np.sqrt(np.mean(plain.astype(np.float64) ** 2, axis=1))
    apart = np.sqrt(np.mean((plain.astype(np.float64) - quick) ** 2, axis=1))
    worst = float(np.max(apart / sizes))
    return worst if np.isfinite(worst) else -1.0


def _logits(path: str, n_threads: int, *, is_quick: bool) -> tuple[NDArray[np.float32], list[str]]:
    """The logits of all rows, and the names of the buffers beyond the plain ones that hold weights."""
    with _opened(path, n_threads, is_quick=is_quick) as (context, n_vocab):
        buffers = {
            line.rpartition(_BUFFER_LINE)[0].rpartition(b":")[2].strip().decode()
            for line in _log_lines
            if _BUFFER_LINE in line
        }
        batch = native.llama_batch_init(max(BATCHES), 0, 1)
        position, logits = 0, []
        for n_rows in BATCHES:
            batch.n_tokens = n_rows
            for row in range(n_rows):
                batch.token[row] = (position + row) * 37 % n_vocab
                batch.pos[row] = position + row
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
            code = native.llama_decode(context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code}")
            position += n_rows
            rows = native.llama_get_logits(context)
            logits.append(np.ctypeslib.as_array(rows, shape=(n_rows * n_vocab,)).reshape(n_rows, n_vocab).copy())
        native.llama_batch_free(batch)
    return np.concatenate(logits), sorted(buffers - _PLAIN_BUFFERS)


@contextlib.contextmanager
def _opened(path: str, n_threads: int, *, is_quick: bool) -> Iterator[tuple[Any, int]]:
    """A context, and the size of the vocabulary."""
    _log_lines.clear()
    params = native.llama_model_default_params()
    params.use_extra_bufts = is_quick
    params.n_gpu_layers = 0
    no_devices = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.addressof(no_devices)
    model = native.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise RuntimeError(f"{path} cannot be loaded: {_log_lines[-1:]}")
    of_context = native.llama_context_default_params()
    of_context.n_ctx = of_context.n_batch = of_context.n_ubatch = N_CELLS
    of_context.n_threads = of_context.n_threads_batch = n_threads
    of_context.no_perf = True
    context = native.llama_init_from_model(model, of_context)
    if not context:
        raise RuntimeError(f"no context for {path}: {_log_lines[-1:]}")
    yield context, native.llama_vocab_n_tokens(native.llama_model_get_vocab(model))
    native.llama_free(context)
    native.llama_model_free(model)


def _leave_no_core() -> None:
    """Crashes are expected here; nobody wants to hear of them from the system."""
    with contextlib.suppress(ImportError):  # there are no core files on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # A crash reporter that reads core dumps through a pipe ignores the limit.
        pr_set_dumpable = 4
        ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)


def _take_log_line(level: int, text: bytes, _data: object) -> None:
    _log_lines.append(text)


_log_callback = native.llama_log_callback(_take_log_line)

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
