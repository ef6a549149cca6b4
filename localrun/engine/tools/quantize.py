"""Quantizes a model file: `python -m localrun.engine.tools.quantize SOURCE TARGET FILE_TYPE N_THREADS`.

A process of its own, started by the daemon, because native code that meets a damaged file may end the process it runs
in. `FILE_TYPE` is a number of llama.cpp's `llama_ftype`. Each tensor that is done is a line on stdout, `{"done": 3,
"total": 291}`; a failure is `{"error": "..."}` and exit code 1. It ends when its stdin closes, so that it does not
outlive the daemon, and it is polite: streams that run meanwhile go first.

Does not: name the result; a target that was not finished is for the caller to delete.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import TextIO

from localrun.engine.native.library import last_problem, log_callback, native
from localrun.engine.tools import own_stdout, say
from localrun.hardware.processors import usable
from localrun.processes import step_back

NICENESS = 10
# The quantizer's own words for a tensor: "[  12/ 291]  blk.1.ffn_up.weight - [ 576, 1536, 1, 1], ...".
_TENSOR = re.compile(rb"^\[\s*(\d+)/\s*(\d+)\]")


def main(argv: list[str], lines: TextIO) -> int:
    """Exit code 0 when the target is complete, 1 when it is not. `lines` is where the parent listens."""
    source, target, file_type, n_threads = argv
    source, target = os.path.abspath(source), os.path.abspath(target)
    # llama.cpp opens what it writes by a name in the system's code page, which on Windows lacks most folders' letters.
    os.chdir(os.path.dirname(target))
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    step_back(NICENESS)

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
    if native.llama_model_quantize(os.fsencode(source), os.fsencode(os.path.basename(target)), params) != 0:
        say(lines, error=last_problem())
        return 1
    return 0


def _leave_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os._exit(1)


if __name__ == "__main__":
    to_parent = own_stdout()
    exit_code = main(sys.argv[1:], to_parent)
    sys.stderr.flush()
    # At once: a parent that closes stdin as soon as stdout ends must not turn a good end into a bad one.
    os._exit(exit_code)
