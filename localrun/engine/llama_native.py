"""The only import of `llama_cpp` in the project: the bare functions of llama.cpp, and where its log lines go.

Owner: whoever uses `llama.LlamaBackend`. Importing this loads the native library.
Does not: call anything, or check an argument; `llama.py` and `llama_sampler.py` do.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

# OpenMP threads spin at every barrier of the graph, for milliseconds by default. When anything else wants a core, the
# spinning thread keeps it from the very thread it waits for. Spinning briefly and then sleeping costs nothing on a free
# machine (8 streams, two cores: 679 to 710 tokens/s against 554 to 670) and gave 205 instead of 130 tokens/s beside a
# busy process. Read by the library when it loads, hence before the import.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import llama_cpp.llama_cpp as native

__all__ = ["last_problem", "library_folder", "log_callback", "native"]

log = logging.getLogger("localrun.llama")

_GGML_LOG_WARN, _GGML_LOG_ERROR = 3, 4
# llama.cpp takes the pool of all slots for one sequence's context; no sequence here goes beyond what was trained.
_POOL_WARNING = "possible training context overflow"

_problems: list[str] = []


def library_folder() -> Path:
    """Where the native libraries lie that this process has loaded."""
    return Path(native._lib._name).parent


def last_problem() -> str:
    """The last warning or error that llama.cpp logged."""
    return _problems[-1] if _problems else "it gave no reason"


def _take_log_line(level: int, text: bytes, _data: object) -> None:
    """llama.cpp's own log lines: problems go to our log and are kept for the next error message."""
    line = text.decode("utf-8", "replace").strip()
    if level in (_GGML_LOG_WARN, _GGML_LOG_ERROR) and line and _POOL_WARNING not in line:
        _problems[:] = [*_problems[-20:], line]
        log.warning("%s", line)


# Kept in a module variable because native code holds a bare pointer to it.
log_callback = native.llama_log_callback(_take_log_line)
