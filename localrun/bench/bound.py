"""The memory-bandwidth bound of decoding: tok/s = B * BW / (W + sum k).

A decode step reads every weight once (W bytes) and the keys and values of each of its B streams (k bytes each), and
makes B tokens. At BW bytes per second it cannot take less than (W + sum k) / BW seconds. Compute comes on top, so the
bound is not always near, but no server on this memory decodes faster, whatever its scheduler does.

Pure. Does not measure the bandwidth (`bandwidth.py`), and counts neither activations, nor writes, nor what caches keep
from one step to the next: for a model that fits the processor's cache the bound does not hold.
"""

from __future__ import annotations

from typing import NamedTuple

from localrun.models.header import Header
from localrun.models.memory import estimate

# KV bytes per token are taken from this many cells, the step in which llama.cpp rounds a context.
_CELLS = 256


class StepBytes(NamedTuple):
    """What one decode step must read: `weights_bytes` once, `kv_bytes_per_token` for each token of each stream."""

    weights_bytes: float
    kv_bytes_per_token: float


def step_bytes(header: Header, *, n_streams: int) -> StepBytes:
    """Bytes that a step of `n_streams` rows reads of this model, its KV being f16, the default of both servers.

    An embedding matrix that is not the output matrix too is not read: a step looks up a row per stream. Of E experts
    of which each row uses u, B rows read E * (1 - (1 - u/E) ** B) in expectation, rows choosing independently.
    """
    is_tied = not any(tensor.name == "output.weight" for tensor in header.tensors)
    n_experts, n_used = (_count(header, key) for key in ("expert_count", "expert_used_count"))
    share_of_experts = 1 - (1 - n_used / n_experts) ** n_streams if n_experts else 1.0
    weights_bytes = 0.0
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight" and not is_tied:
            continue
        weights_bytes += tensor.size_bytes * (share_of_experts if "_exps." in tensor.name else 1.0)
    memory = estimate(header, n_kv_cells=_CELLS, n_slots=1, n_ubatch=1, kv_type="f16")
    return StepBytes(weights_bytes, memory.kv_bytes / _CELLS)


def decode_bound_tokens_per_s(read: StepBytes, bandwidth_bytes_per_s: float, context_tokens: list[float]) -> float:
    """Most tokens per second that streams with `context_tokens` tokens each can get together; one entry per stream."""
    step_s = (read.weights_bytes + read.kv_bytes_per_token * sum(context_tokens)) / bandwidth_bytes_per_s
    return len(context_tokens) / step_s


def _count(header: Header, key: str) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    return value if isinstance(value, int) else 0
