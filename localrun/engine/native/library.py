"""The only import of `llama_cpp` in the project: the bare functions of llama.cpp, where its log lines go, its devices,
and the threads that compute.

Owner: whoever uses `llama.LlamaBackend`. Importing this loads the native library, and its backends where these are
modules: builds for many processors have one for each generation, of which ggml opens the best that runs here.
Does not: call anything else, or check an argument; `llama.py` and `sampler.py` do.
"""

from __future__ import annotations

import ctypes
import importlib.util
import locale
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from localrun.errors import EngineFailed

# OpenMP threads spin at every barrier of the graph, for milliseconds by default. When anything else wants a core, the
# spinning thread keeps it from the very thread it waits for. Spinning briefly and then sleeping costs nothing on a free
# machine (8 streams, two cores: 679 to 710 tokens/s against 554 to 670) and gave 205 instead of 130 tokens/s beside a
# busy process. Read by the library when it loads, hence before the import.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# An abort of ggml's would start a debugger where there is one, which takes seconds in which streams could go on.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

if sys.platform == "win32":
    # The library and its modules are opened in a way that looks for a GPU's runtime along PATH alone; and the package
    # fails at a toolkit that was removed and left its variable behind.
    for _variable in ("CUDA_PATH", "HIP_PATH"):
        _toolkit = Path(os.environ.get(_variable, ""))
        if os.environ.get(_variable) and not all((_toolkit / name).is_dir() for name in ("bin", "lib")):
            del os.environ[_variable]
        elif os.environ.get(_variable):
            os.environ["PATH"] += "".join(f"{os.pathsep}{_toolkit / name}" for name in ("bin", "bin/x64"))
    # Files that C++ opens by narrow names (projectors, adapters) may have letters of any language in theirs.
    with suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, ".UTF8")

_package = importlib.util.find_spec("llama_cpp")


@contextmanager
def _bare_package() -> Iterator[None]:
    """Inside of this, modules of the package come without what the package itself imports, chat formats and all: that
    is a quarter of the time that an engine takes to start, and streams wait for it when it takes the place of one that
    died."""
    if _package is None or "llama_cpp" in sys.modules:
        yield
        return
    sys.modules["llama_cpp"] = bare = ModuleType("llama_cpp")
    bare.__path__ = list(_package.submodule_search_locations or ())
    for name, module in [*sys.modules.items()]:
        if name.startswith("llama_cpp."):
            setattr(bare, name.removeprefix("llama_cpp."), module)
    try:
        yield
    finally:
        del sys.modules["llama_cpp"]


with _bare_package():
    import llama_cpp.llama_cpp as native

__all__ = ["native"]

log = logging.getLogger("localrun.llama")

_GGML_LOG_WARN, _GGML_LOG_ERROR = 3, 4
# Warnings about nothing. llama.cpp takes the pool of all slots for one sequence's context; no sequence here goes beyond
# what was trained. It wonders about positions behind a picture, which are fewer than its rows. It says of every
# weight with quick kernels that a LoRA for it has plain ones. And of
# a graph that was given up, as it was told to, it speaks in four lines, with ggml's status 1 and its own code 2.
_EXPECTED = (
    "possible training context overflow",
    "non-consecutive token position",
    "cannot use buft",
    "compute_async failed with error 1",
    "compute status: 1",
    "removing memory module entries",
    "ret = 2",
)
# What it ends a list of reasons with, which says none.
_SUMMARY = "failed to load model"

_problems: list[str] = []


def library_folder() -> Path:
    """Where the native libraries lie that this process has loaded."""
    return Path(native._lib._name).parent


def mtmd() -> Any:
    """The bare functions of libmtmd, which makes rows of pictures and sound. Raises EngineFailed where there is none.

    It must lie beside the library: one that lies elsewhere would bring a llama.cpp of its own."""
    os.environ["MTMD_CPP_LIB"] = str(library_folder())
    try:
        with _bare_package():
            import llama_cpp.mtmd_cpp as bindings
    except (OSError, RuntimeError, ImportError) as error:
        raise EngineFailed(
            f"pictures and sound need libmtmd, which this build of llama.cpp does not have in {library_folder()} "
            f"({error}); install llama-cpp-python without LLAVA_BUILD=OFF, or use the model without its projector"
        ) from None
    return bindings


def last_problem() -> str:
    """The last warning or error that llama.cpp logged."""
    return _problems[-1] if _problems else "it gave no reason"


# Metal's words for rows that it did not compute, which it says when it is waited for. Only the next call fails.
_UNCOMPUTED = re.compile(r"command buffer \d+ failed with status")
_uncomputed: list[str] = []


def uncomputed() -> str:
    """What a device said of rows that it did not compute, since the last time somebody asked; empty if nothing."""
    said = "; ".join(_uncomputed)
    _uncomputed.clear()
    return said


def _take_log_line(level: int, data: bytes, _data: object) -> None:
    """llama.cpp's own log lines: problems go to our log and are kept for the next error message."""
    line = data.decode("utf-8", "replace").strip()
    if _UNCOMPUTED.search(line):
        _uncomputed.append(line)
    if level in (_GGML_LOG_WARN, _GGML_LOG_ERROR) and line and not any(text in line for text in _EXPECTED):
        if not line.endswith(_SUMMARY):
            _problems[:] = [*_problems[-20:], line]
        log.warning("%s", line)


# Kept in a module variable because native code holds a bare pointer to it.
log_callback = native.llama_log_callback(_take_log_line)


class _Libraries:
    """Functions of several libraries, each where it is found first."""

    def __init__(self, *libraries: ctypes.CDLL) -> None:
        self._libraries = libraries

    def __getattr__(self, name: str) -> Any:
        for library in self._libraries:
            with suppress(AttributeError):
                return getattr(library, name)
        raise AttributeError(f"function '{name}' not found")


@cache
def ggml() -> Any:
    """All functions of ggml and llama.cpp. Only Windows looks for a name in one library and not in those that it was
    linked to: there the registry of backends is in `ggml.dll`, and the rest of ggml in `ggml-base.dll`."""
    if sys.platform == "win32":
        files = (library_folder() / name for name in ("ggml.dll", "ggml-base.dll"))
        return _Libraries(*(ctypes.CDLL(str(file)) for file in files), native._lib)
    return native._lib


def bound(name: str, result: Any, *arguments: Any) -> Any:
    """A function that the Python bindings leave out, or describe in another way."""
    function = getattr(ggml(), name)
    function.restype, function.argtypes = result, arguments
    return function


def backend_names() -> list[str]:
    """Of what ggml was built with or has opened, such as CPU and CUDA."""
    found = range(bound("ggml_backend_reg_count", ctypes.c_size_t)())
    handles = map(bound("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t), found)
    return [name.decode() for name in map(bound("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p), handles)]


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
    if bound("ggml_backend_reg_count", ctypes.c_size_t)():
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
    bound("ggml_backend_load_all_from_path", None, ctypes.c_char_p)(os.fsencode(library_folder()))
    native.llama_log_set(log_callback, None)
    return tuple(names)


loaded_modules = _load_modules()


_INTEGRATED = 2  # GGML_BACKEND_DEVICE_TYPE_IGPU
_IS_GPU = (1, _INTEGRATED)


def gpus() -> list[tuple[str, int, bool, int]]:
    """Name, free bytes, whether it computes in the machine's own memory, and total bytes of each GPU; empty where this
    build can use none. Metal calls a Mac's GPU no integrated one, and its memory free whatever other processes hold."""
    memory_of = bound("ggml_backend_dev_memory", None, ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2)
    description_of = bound("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    found = []
    for device in gpu_devices():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory_of(device, ctypes.byref(free), ctypes.byref(total))
        is_shared = sys.platform == "darwin" or _type_of(device) == _INTEGRATED
        found.append((description_of(device).decode(errors="replace"), free.value, is_shared, total.value))
    return found


def gpu_devices() -> list[int]:
    """ggml's handles of the GPUs."""
    native.llama_backend_init()
    n_devices = bound("ggml_backend_dev_count", ctypes.c_size_t)()
    handles = map(bound("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t), range(n_devices))
    return [device for device in handles if _type_of(device) in _IS_GPU]


def _type_of(device: int) -> int:
    kind: int = bound("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(device)
    return kind


def gpu_free_bytes() -> int | None:
    """Free memory of all GPUs together; None where this build can use none."""
    found = gpus()
    return sum(free_bytes for _, free_bytes, _, _ in found) if found else None


# --- the threads that compute ----------------------------------------------------------------------------------------

_PAUSE_SOFT = 1  # omp_pause_soft: the threads go, and settings stay
_CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_MAX_THREADS = 512  # GGML_MAX_N_THREADS
# How long a worker looks for the next graph before it sleeps, in units of 131,072 pauses of the processor: 2 to 6 ms,
# which spans the time between two steps. llama.cpp's own 50 keep a processor from others for a tenth of a second.
_POLL = 1


class _Params(ctypes.Structure):
    """`struct ggml_threadpool_params` of ggml.h."""

    _fields_ = [
        ("cpumask", ctypes.c_bool * _MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    ]


class Threadpools:
    """The threads that compute graphs on the CPU, which all contexts of a process share: a pool for each number of
    threads that is used. One that nobody uses sleeps.

    Without a pool of its own llama.cpp starts and ends threads for every graph (builds without OpenMP), and two pools,
    or two teams of OpenMP, are more threads than processors: they take turns at every barrier. Contexts may share a
    pool because no two graphs are ever computed at once: the background pauses only between the pieces of its graph
    (`worker.py`), when no worker waits for another. Threads are not pinned to processors, which beside other programs
    costs more than it gains.

    Invariants: a pool has as many threads as its graphs, because those that a graph leaves out would spin all the same;
    pools outlive the contexts that use them.
    """

    def __init__(self) -> None:
        self._pools: dict[int, int | None] = {}
        # A library without pools makes threads for every graph.
        self._new = _cpu_function("ggml_threadpool_new", ctypes.c_void_p, ctypes.POINTER(_Params))
        self._free = _cpu_function("ggml_threadpool_free", None, ctypes.c_void_p)
        self._attach = bound("llama_attach_threadpool", None, *[ctypes.c_void_p] * 3)
        self._set_number = bound("llama_set_n_threads", None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)

    def use(self, context: ctypes.c_void_p, n_threads: int) -> None:
        """Graphs of a `llama_context` are computed by so many threads from now on, the caller's included."""
        if n_threads not in self._pools:
            self._pools[n_threads] = self._open(n_threads)
        pool = self._pools[n_threads]
        self._attach(context, pool, pool)
        self._set_number(context, n_threads, n_threads)

    def close(self) -> None:
        """End the threads. The contexts are closed already."""
        for pool in self._pools.values():
            if pool and self._free:
                self._free(pool)
        self._pools.clear()

    def _open(self, n_threads: int) -> int | None:
        """None for a single thread: a graph without a pool begins none then."""
        if n_threads == 1 or not self._new or not self._free:
            return None
        params = _Params(n_threads=n_threads, prio=0, poll=_POLL, strict_cpu=False, paused=False)
        opened: int | None = self._new(ctypes.byref(params))
        return opened


def end_team() -> None:
    """The calling thread's team of OpenMP ends, where libgomp computes; its next graph begins one anew, in some 50 us.

    As soon as all threads' teams together have more members than there are processors, libgomp has them sleep at every
    barrier, though only one team computes. Steps of one stream took 10 to 15 ms then instead of 5 to 7."""
    pause = _pause_teams()
    if pause is not None:
        pause(_PAUSE_SOFT)


@cache
def _pause_teams() -> ctypes._FuncPointer | None:
    opened = [ctypes.CDLL(str(library_folder() / name)) for name in loaded_modules]
    for library in (native._lib, *opened):  # a symbol is found in the libraries that these need, too
        # LLVM's has the function as well, but means the threads of the whole process by it.
        if hasattr(library, "omp_pause_resource_all") and not hasattr(library, "__kmpc_fork_call"):
            pause: ctypes._FuncPointer = library.omp_pause_resource_all
            return pause
    return None


def _cpu_function(name: str, result: type | None, *arguments: type) -> ctypes._FuncPointer | None:
    """A function of the CPU backend, which may be a module that was opened at run time; None if it has no such."""
    device = bound("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(_CPU_DEVICE)
    if not device:
        return None
    registry = bound("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(device)
    find = bound("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    address = find(registry, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None
