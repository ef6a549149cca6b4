"""The threads that compute graphs on the CPU, which all contexts of a process share.

Without a pool of its own llama.cpp starts and ends threads for every graph (builds without OpenMP), and two pools, or
two teams of OpenMP, are more threads than processors: they take turns at every barrier. Contexts may share a pool
because no two graphs are ever computed at once: the background pauses only between the pieces of its graph
(`llama_staging.py`), when no worker waits for another.

Owner: the engine's main thread. Invariants: a pool has as many threads as its graphs, because those that a graph leaves
out would spin all the same; pools outlive the contexts that use them.
Does not: import llama_cpp (`llama.py` hands over its library); pin threads to processors, which beside other programs
costs more than it gains.
"""

from __future__ import annotations

import ctypes

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
    """A pool for each number of threads that is used. One that nobody uses sleeps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pools: dict[int, int | None] = {}
        # A library without pools makes threads for every graph.
        self._new = _cpu_function(library, "ggml_threadpool_new", ctypes.c_void_p, ctypes.POINTER(_Params))
        self._free = _cpu_function(library, "ggml_threadpool_free", None, ctypes.c_void_p)
        library.llama_attach_threadpool.restype = None
        library.llama_attach_threadpool.argtypes = [ctypes.c_void_p] * 3
        library.llama_set_n_threads.restype = None
        library.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]

    def use(self, context: ctypes.c_void_p, n_threads: int) -> None:
        """Graphs of a `llama_context` are computed by so many threads from now on, the caller's included."""
        if n_threads not in self._pools:
            self._pools[n_threads] = self._open(n_threads)
        pool = self._pools[n_threads]
        self._library.llama_attach_threadpool(context, pool, pool)
        self._library.llama_set_n_threads(context, n_threads, n_threads)

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


def _cpu_function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> ctypes._FuncPointer | None:
    """A function of the CPU backend, which may be a module that was opened at run time; None if it has no such."""
    library.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    library.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    library.ggml_backend_dev_backend_reg.argtypes = [ctypes.c_void_p]
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    library.ggml_backend_reg_get_proc_address.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    device = library.ggml_backend_dev_by_type(_CPU_DEVICE)
    if not device:
        return None
    registry = library.ggml_backend_dev_backend_reg(device)
    address = library.ggml_backend_reg_get_proc_address(registry, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None
