"""The only import of `llama_cpp` in the project: the bare functions of llama.cpp, and where its log lines go.

Owner: whoever uses `llama.LlamaBackend`. Importing this loads the native library, and its backends where these are
modules: builds for many processors have one for each generation, of which ggml opens the best that runs here.
Does not: call anything else, or check an argument; `llama.py` and `llama_sampler.py` do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from pathlib import Path

# OpenMP threads spin at every barrier of the graph, for milliseconds by default. When anything else wants a core, the
# spinning thread keeps it from the very thread it waits for. Spinning briefly and then sleeping costs nothing on a free
# machine (8 streams, two cores: 679 to 710 tokens/s against 554 to 670) and gave 205 instead of 130 tokens/s beside a
# busy process. Read by the library when it loads, hence before the import.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import llama_cpp.llama_cpp as native

__all__ = ["ggml", "last_problem", "library_folder", "loaded_modules", "log_callback", "native", "skipped_modules"]

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


def ggml() -> ctypes.CDLL:
    """The library that knows the backends; only Windows does not find its functions by way of llama.cpp's."""
    if sys.platform == "win32":
        return ctypes.CDLL(str(library_folder() / "ggml.dll"))
    return native._lib  # type: ignore[no-any-return]


def skipped_modules() -> dict[str, str]:
    """Backends that lie beside the library as modules and were not loaded, with the loader's reason. Of the modules for
    processors all but one are left out on purpose, so they do not count."""
    skipped: dict[str, str] = {}
    for path in sorted(library_folder().glob("*ggml-*")):
        kind = _MODULE_NAME.fullmatch(path.name)
        if not loaded_modules or kind is None or kind[1] == "base" or kind[1].startswith("cpu"):
            continue
        if path.name not in loaded_modules:
            try:
                ctypes.CDLL(str(path))
                skipped[path.name] = "it found nothing here that it can compute on"
            except OSError as error:
                skipped[path.name] = str(error)
    return skipped


_MODULE_NAME = re.compile(r"(?:lib)?ggml-([\w-]+)\.(?:so|dll|dylib)")
_LOADED = re.compile(rb"loaded \S+ backend from (.+)")


def _load_modules() -> tuple[str, ...]:
    """Opens the backends of a library that has none linked to it. Returns the names of their files."""
    library = ggml()
    library.ggml_backend_reg_count.restype = ctypes.c_size_t
    if library.ggml_backend_reg_count():
        return ()
    names: list[str] = []

    def take_log_line(level: int, text: bytes, data: object) -> None:
        loaded = _LOADED.search(text.strip())
        if loaded is not None:
            names.append(Path(os.fsdecode(loaded[1])).name)
        else:
            _take_log_line(level, text, data)

    callback = native.llama_log_callback(take_log_line)
    native.llama_log_set(callback, None)
    library.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    library.ggml_backend_load_all_from_path.restype = None
    library.ggml_backend_load_all_from_path(os.fsencode(library_folder()))
    native.llama_log_set(log_callback, None)
    return tuple(names)


loaded_modules = _load_modules()
