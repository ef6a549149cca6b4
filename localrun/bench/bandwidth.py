"""How many bytes per second this machine's threads read from memory, measured on the spot.

Every thread reads an array of its own, 256 MiB of 64-bit integers, by or-ing it into one number: the cheapest
reduction that numpy vectorizes, without a BLAS library that would bring its own threads. All threads start a pass
together, and a pass lasts until the slowest is done. The best pass counts, since the bound asks what the memory can do,
not what it does on average beside other programs. Together the arrays are many times larger than the caches of the
machines this runs on, so hardly anything of a pass is still there in the next one.

A measurement, so not pure. Only for models in main memory: the memory of a GPU is another one.
"""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

ARRAY_BYTES = 256 * 1024 * 1024
PASSES = 20


def read_bandwidth_bytes_per_s(n_threads: int, *, array_bytes: int = ARRAY_BYTES, passes: int = PASSES) -> float:
    """Bytes per second that `n_threads` threads read together. Takes about a second, and the arrays' memory."""
    # Ones, because untouched zeros would all be the same page.
    arrays: list[NDArray[np.int64]] = [np.ones(array_bytes // 8, dtype=np.int64) for _ in range(n_threads)]
    return max(n_threads * array_bytes / _pass_s(arrays) for _ in range(passes))


def _pass_s(arrays: list[NDArray[np.int64]]) -> float:
    """Seconds in which every thread has read its array once."""
    barrier = threading.Barrier(len(arrays) + 1)

    def read(array: NDArray[np.int64]) -> None:
        barrier.wait()
        np.bitwise_or.reduce(array)
        barrier.wait()

    threads = [threading.Thread(target=read, args=(array,)) for array in arrays]
    for thread in threads:
        thread.start()
    barrier.wait()
    started_s = time.perf_counter()
    barrier.wait()
    elapsed_s = time.perf_counter() - started_s
    for thread in threads:
        thread.join()
    return elapsed_s
