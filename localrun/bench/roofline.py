"""What the memory that holds a model allows at most: the bound of decoding, tok/s = B * BW / (W + sum k).

A decode step reads every weight once (W bytes) and the keys and values of each of its B streams (k bytes each), and
makes B tokens. At BW bytes per second it cannot take less than (W + sum k) / BW seconds. Compute comes on top, so the
bound is not always near, but no server on this memory decodes faster, whatever its scheduler does.

The bound counts neither activations, nor writes, nor what caches keep from one step to the next: for a model that fits
the processor's cache it does not hold. The bandwidth is given, or measured on the spot for main memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.models.gguf.header import Header, TensorInfo
from localrun.models.gguf.reader import read_header
from localrun.models.memory import estimate

# --- the bandwidth ---
# Every thread reads an array of its own, 256 MiB of 64-bit integers, by or-ing it into one number: the cheapest
# reduction that numpy vectorizes, without a BLAS library that would bring its own threads. All threads start a pass
# together, and a pass lasts until the slowest is done. The best pass counts, since the bound asks what the memory can
# do, not what it does on average beside other programs. Together the arrays are many times larger than the caches of
# the machines this runs on, so hardly anything of a pass is still there in the next one.

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


# --- the bound ---

# KV bytes per token are taken from this many cells, the step in which llama.cpp rounds a context.
_CELLS = 256


class StepBytes(NamedTuple):
    """What one decode step must read: `weights_bytes` once, `kv_bytes_per_token` for each token of each stream."""

    weights_bytes: float
    kv_bytes_per_token: float


def tensors_read(header: Header, n_rows: int) -> Iterator[tuple[TensorInfo, float]]:
    """What a step of so many rows reads of this model, and which part of each.

    An embedding matrix that is not the output matrix too is not read: a step looks up a row per stream. Of E experts
    of which each row uses u, B rows read E * (1 - (1 - u/E) ** B) in expectation, rows choosing independently.
    """
    is_tied = not any(tensor.name == "output.weight" for tensor in header.tensors)
    n_experts, n_used = header.count("expert_count"), header.count("expert_used_count")
    share_of_experts = 1 - (1 - n_used / n_experts) ** n_rows if n_experts else 1.0
    for tensor in header.tensors:
        if tensor.name != "token_embd.weight" or is_tied:
            yield tensor, share_of_experts if "_exps." in tensor.name else 1.0


def step_bytes(header: Header, *, n_streams: int) -> StepBytes:
    """Bytes that a step of `n_streams` rows reads of this model, its KV being f16, the default of both servers."""
    weights_bytes = sum(share * tensor.size_bytes for tensor, share in tensors_read(header, n_streams))
    memory = estimate(header, n_kv_cells=_CELLS, n_slots=1, n_ubatch=1, kv_type="f16")
    return StepBytes(weights_bytes, memory.kv_bytes / _CELLS)


def decode_bound_tokens_per_s(read: StepBytes, bandwidth_bytes_per_s: float, context_tokens: list[float]) -> float:
    """Most tokens per second that streams with `context_tokens` tokens each can get together; one entry per stream."""
    step_s = (read.weights_bytes + read.kv_bytes_per_token * sum(context_tokens)) / bandwidth_bytes_per_s
    return len(context_tokens) / step_s


class Roofline(NamedTuple):
    """`header` is the model's; `bandwidth_bytes_per_s` that of the memory that holds it."""

    header: Header
    bandwidth_bytes_per_s: float

    def bound_tokens_per_s(self, n_streams: int, context_tokens: float) -> float:
        """Most that `n_streams` streams with so many tokens of context each can get together."""
        read = step_bytes(self.header, n_streams=n_streams)
        return decode_bound_tokens_per_s(read, self.bandwidth_bytes_per_s, [context_tokens] * n_streams)


def roofline(model: Path, n_threads: int, bandwidth_bytes_per_s: float | None = None) -> Roofline:
    """Of a model file. Without a bandwidth, that of this machine's main memory is measured now, with `n_threads`.

    Raises BadModelFile for a file that cannot be read.
    """
    header = read_header(model)
    return Roofline(header, bandwidth_bytes_per_s or read_bandwidth_bytes_per_s(n_threads))
