"""Memory that is written to for the first time is slow: where cells and saved states lie, and when their pages come and
go.

llama.cpp writes zeroes into all cells when it opens a context, so all of them take memory, used or not: 750 MB for
32,768 cells of a model of 135M. On Linux such pages are given back, and come as zeroes when somebody looks at them.
That takes about ten times as long as copying into memory that is there, on virtual machines more: 57 MB took 100 to 400
ms. So what a long prompt is going to need is touched beforehand, by a thread (`touch`).

Does not: decide what is needed when (`context.py`).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import State
from localrun.engine.native.library import bound, native

# Keys and values; what a convolution remembers, and states.
_CELLS = re.compile(rb"(cache_[kvrs]_l\d+)\b")
# Of Linux.
_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 4096
# Touched in less than a millisecond where memory is quick, and a multiple of every page size.
_TOUCH_BYTES = 256 << 10
# C++, and not among the declared functions: what llama.cpp calls itself when it opens a context, to reserve memory.
_GRAPH_RESERVE = "_Z19llama_graph_reserveP13llama_contextjjj"
# Of a buffer for states, what is kept for the next time.
KEPT_BUFFER_BYTES = 128 << 20


class AddressRange(NamedTuple):
    """A range of addresses."""

    begin: int
    size_bytes: int


def memory_of_cells(context: ctypes.c_void_p, n_seqs: int, n_outputs: int) -> list[AddressRange]:
    """Where a new context's KV cells are: each layer's keys and values, if they lie in this machine's own memory.

    That is read from the nodes of an empty graph, by their names; where these differ the list is empty.
    """
    if not hasattr(native._lib, _GRAPH_RESERVE):
        return []
    reserve = getattr(native._lib, _GRAPH_RESERVE)
    reserve.restype = ctypes.c_void_p
    reserve.argtypes = [ctypes.c_void_p, *[ctypes.c_uint32] * 3]
    n_nodes = bound("ggml_graph_n_nodes", ctypes.c_int, ctypes.c_void_p)
    node_at = bound("ggml_graph_node", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    name_of = bound("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
    data_of = bound("ggml_get_data", ctypes.c_void_p, ctypes.c_void_p)
    size_of = bound("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
    # The last graph that the constructor of a context reserves. The plan of where a graph's tensors lie stays, and with
    # that of another graph deep prompts take a quarter longer.
    n_tokens = min(native.llama_n_ctx(context), native.llama_n_ubatch(context))
    graph = reserve(context, n_tokens, n_seqs, min(n_tokens, n_outputs))
    bounds: dict[bytes, tuple[int, int]] = {}
    for index in range(n_nodes(graph) if graph else 0):
        node = node_at(graph, index)
        name = _CELLS.match(name_of(node))
        if name is not None and (begin := data_of(node)):
            known = bounds.get(name[1], (begin, begin))
            bounds[name[1]] = min(known[0], begin), max(known[1], begin + size_of(node))
    return [AddressRange(begin, end - begin) for begin, end in bounds.values()]


def give_back(memory: Iterable[AddressRange]) -> int:
    """All whole pages of this memory go back to the system. Returns how many bytes that were; 0 where it cannot be
    done."""
    n_given = 0
    for begin, size in memory:
        first, end = -(-begin // _PAGE_BYTES) * _PAGE_BYTES, (begin + size) // _PAGE_BYTES * _PAGE_BYTES
        if end > first and _advise(first, end - first, _MADV_DONTNEED):
            n_given += end - first
    return n_given


def touch(memory: Iterable[AddressRange]) -> None:
    """The system provides the pages of this memory now, so that nobody has to wait for that later. What is in it stays,
    and others may use it meanwhile. Nothing happens where the system cannot do it (Linux before 5.14, and others).

    A little at a time: meanwhile nobody else in this process can get memory from the system or give it back."""
    for begin, size in memory:
        for at in range(begin // _PAGE_BYTES * _PAGE_BYTES, begin + size, _TOUCH_BYTES):
            _advise(at, min(_TOUCH_BYTES, begin + size - at), _MADV_POPULATE_WRITE)


def _advise(begin: int, size: int, what: int) -> bool:
    if sys.platform != "linux":
        return False
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(advise(begin, size, what) == 0)


class StateBuffer:
    """What saved states pass through. It is kept for the next time, unless it takes too much memory (`trim`)."""

    def __init__(self) -> None:
        self._data = np.empty(0, np.uint8)
        self._n_touched = 0

    @property
    def size_bytes(self) -> int:
        """What is kept for the next time."""
        return self._data.size

    def get(self, size: int) -> NDArray[np.uint8]:
        """The buffer, which has so many bytes and perhaps more. What was in it may be lost."""
        self._grow(size)
        self._n_touched = max(self._n_touched, size)
        return self._data

    def untouched(self, size: int) -> list[AddressRange]:
        """What of the first `size` bytes has never been written to. Whoever asks touches it."""
        self._grow(size)
        if self._n_touched >= size:
            return []
        begin, self._n_touched = self._n_touched, size
        return [AddressRange(self._data.ctypes.data + begin, size - begin)]

    def lend(self) -> NDArray[np.uint8]:
        """Take the buffer away, until `give` brings it or another one."""
        data, self._data, self._n_touched = self._data, np.empty(0, np.uint8), 0
        return data

    def give(self, data: NDArray[np.uint8], n_touched: int) -> None:
        """Keep this one, of which the beginning was written to, unless there is a larger one by now."""
        if data.size > self._data.size:
            self._data, self._n_touched = data, n_touched
        self.trim()

    def trim(self) -> None:
        """Nobody needs what is in it: if much of it takes memory, give it back."""
        if self._n_touched > KEPT_BUFFER_BYTES:
            self._data, self._n_touched = np.empty(0, np.uint8), 0

    def _grow(self, size: int) -> None:
        if size > self._data.size:
            self._data, self._n_touched = _grown(size), 0


# Calls something in another thread.
Help = Callable[[Callable[[], Any]], Future[Any]]


class StateCopy:
    """See `backend.Copy`: memory for a state of `size` bytes is touched in a thread, `export` writes the state into it
    and returns it, and it is `cut` in a thread."""

    def __init__(
        self,
        buffer: StateBuffer,
        size: int,
        export: Callable[[NDArray[np.uint8]], NDArray[np.uint8]],
        cut: Callable[[NDArray[np.uint8]], list[State]],
        help_with: Help,
    ) -> None:
        self.has_left = False
        self.states: list[State] = []
        self._buffer, self._size, self._export, self._cut, self._help_with = buffer, size, export, cut, help_with
        data = buffer.lend()
        self._touching = help_with(lambda: _touched(data, size))
        self._cutting: Future[list[State]] | None = None

    def advance(self) -> bool:
        if self._cutting is None:
            if not self._touching.done():
                return False
            state = self._export(self._touching.result())
            self.has_left = True
            self._cutting = self._help_with(lambda: self._cut(state))
        elif self._cutting.done() and not self.states:
            self.states = self._cutting.result()
            self._buffer.give(self._touching.result(), self._size)
        return bool(self.states)

    def wait(self, timeout_s: float) -> None:
        pending: Future[Any] = self._cutting or self._touching
        wait([pending], timeout_s)


def _touched(data: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """This buffer, or another one, of which so many bytes were written to."""
    if data.size < size:
        data = _grown(size)
        data[:size] = 0
    return data


def _grown(size: int) -> NDArray[np.uint8]:
    """A new buffer of this size, and a little for the next state."""
    return np.empty(size + size // 4, np.uint8)
