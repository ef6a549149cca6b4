"""How much memory an engine will need for a model, from the header alone.

Pure arithmetic. Weights, KV cache and recurrent states follow from the tensors and dimensions exactly, as far as
`layer_memory` knows the architecture. The compute buffers are a formula (`compute_memory`). What the process itself
takes was measured. README.md has the estimates beside the memory of real engines.

Not modelled, and therefore too high: layers that share a KV cache, and compressed attention (MLA). Not modelled, and
therefore too low: activations of mixtures of experts that are wider than the stated feed-forward width, attention
without flash attention. The prefix cache in memory has a limit of its own and is not counted.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from localrun.errors import BadRequest
from localrun.models.compute_memory import Graph, compute_bytes
from localrun.models.ggml_types import GgmlType, by_name
from localrun.models.header import Header
from localrun.models.layer_memory import ModelMemory, model_memory
from localrun.models.repacked import repacked_bytes

# A unified pool has more sequence ids than slots, for prefixes that wait in the cache.
SPARE_SEQUENCES: Final = 64
MAX_SEQUENCES: Final = 256
# On a CPU long prompts are computed in a second context, this many at once.
STAGING_SEQUENCES: Final = 4
# Python, numpy, llama.cpp and the heap of an engine that has served, measured on Linux; and per entry of the vocabulary
# what llama.cpp's tables of tokens and merges take.
PROCESS_BYTES: Final = 56 * 1024 * 1024
VOCABULARY_ENTRY_BYTES: Final = 200

# llama_context rounds n_ctx up to this many cells, and llama_kv_cache_iswa the cells of windows.
_CELL_STEP = 256
_F32_BYTES = 4
# Copies of a stream through which a long prompt goes from the background to its slot: one buffer. As measured.
_TRANSFERS = 1

KV_TYPES: Final = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


class MemoryEstimate(NamedTuple):
    """Bytes. Weights are mapped from the file, so the system can drop them under pressure; the rest it cannot.

    `staging_bytes` is for long prompts in the background: cells and buffers that no GPU engine has. `process_bytes` is
    what an engine takes whatever it runs, and its vocabulary. `repacked_bytes` of the weights are copied at load: the
    copy is counted among the weights, and the original, which nobody reads again, only in `resident_bytes`.
    `adapter_bytes` are left to whoever knows the adapters: they are files of their own.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    staging_bytes: int = 0
    process_bytes: int = 0
    repacked_bytes: int = 0
    adapter_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        loaded_bytes = self.weights_bytes + self.adapter_bytes + self.kv_bytes
        return loaded_bytes + self.compute_bytes + self.staging_bytes + self.process_bytes

    @property
    def resident_bytes(self) -> int:
        """What the system shows for the process while nobody else wants the memory."""
        return self.total_bytes + self.repacked_bytes


def estimate(
    header: Header, *, n_kv_cells: int, n_slots: int, n_ubatch: int, kv_type: str, may_split: bool = True
) -> MemoryEstimate:
    """Memory of one engine with `n_slots` slots, a pool of `n_kv_cells`, and steps of at most `n_ubatch` rows.

    `kv_type` is f16, q8_0 or q4_0. Without `may_split` there is one pool, as on a GPU; with it, the larger of what an
    engine has with a stream of cells for every slot, and with one pool, to which it changes for a request that needs
    more cells than a stream has. Raises BadRequest for another type.
    """
    if kv_type not in KV_TYPES:
        raise BadRequest(f"unknown KV cache type '{kv_type}'; use one of {', '.join(KV_TYPES)}", field="kv_type")
    n_cells = _whole(n_kv_cells, _CELL_STEP)
    memory = model_memory(header, n_kv_cells=n_cells)
    pool = _pool(header, memory, n_cells, n_slots, n_ubatch, by_name(KV_TYPES[kv_type]))
    if may_split and memory.is_shareable and n_slots > 1:
        return max(pool, _streams(header, memory, pool, n_cells, n_slots, n_ubatch), key=_total)
    return pool


def process_bytes(header: Header) -> int:
    """What an engine takes whatever it runs, and its vocabulary."""
    return PROCESS_BYTES + VOCABULARY_ENTRY_BYTES * header.n_vocab


def layers_kv_bytes(header: Header, *, n_kv_cells: int, n_slots: int, n_ubatch: int, kv_type: str) -> list[int]:
    """The `kv_bytes` of the estimate for one pool, layer by layer."""
    n_cells = _whole(n_kv_cells, _CELL_STEP)
    memory = model_memory(header, n_kv_cells=n_cells)
    return _layers_kv_bytes(header, memory, n_cells, n_slots, n_ubatch, by_name(KV_TYPES[kv_type]))


def _total(needed: MemoryEstimate) -> int:
    return needed.total_bytes


def _pool(
    header: Header, memory: ModelMemory, n_cells: int, n_slots: int, n_ubatch: int, kv_type: GgmlType
) -> MemoryEstimate:
    """One pool of cells. Where nothing can be shared there is a sequence per slot, and each costs a window or state."""
    n_sequences, n_window_cells = _sequences(memory, n_cells, n_slots, n_ubatch)
    n_columns = n_cells + (n_window_cells if memory.n_window else 0)
    return MemoryEstimate(
        weights_bytes=header.weights_bytes,
        kv_bytes=sum(_layers_kv_bytes(header, memory, n_cells, n_slots, n_ubatch, kv_type)),
        compute_bytes=compute_bytes(header, memory, Graph(n_ubatch, n_columns, n_sequences)),
        process_bytes=process_bytes(header),
        repacked_bytes=repacked_bytes(header),
    )


def _streams(
    header: Header, memory: ModelMemory, pool: MemoryEstimate, n_cells: int, n_slots: int, n_ubatch: int
) -> MemoryEstimate:
    """The same cells as a stream for every slot, and streams as long in the background."""
    n_stream_cells = n_cells // n_slots
    n_staging = min(STAGING_SEQUENCES, n_slots)
    staging = Graph(n_ubatch, n_stream_cells, n_staging)
    stream_bytes = pool.kv_bytes // n_slots
    return pool._replace(
        compute_bytes=compute_bytes(header, memory, Graph(n_ubatch, n_stream_cells, n_slots)),
        staging_bytes=(n_staging + _TRANSFERS) * stream_bytes + compute_bytes(header, memory, staging),
    )


def _sequences(memory: ModelMemory, n_cells: int, n_slots: int, n_ubatch: int) -> tuple[int, int]:
    """Sequences that one pool is opened for, and the cells of a layer with a window."""
    n_sequences = min(n_slots + SPARE_SEQUENCES, MAX_SEQUENCES) if memory.is_shareable else n_slots
    return n_sequences, min(n_cells, _whole(memory.n_window * n_sequences + n_ubatch, _CELL_STEP))


def _layers_kv_bytes(
    header: Header, memory: ModelMemory, n_cells: int, n_slots: int, n_ubatch: int, kv_type: GgmlType
) -> list[int]:
    """For each layer one row of keys and one of values per cell, or a state per sequence."""
    n_sequences, n_window_cells = _sequences(memory, n_cells, n_slots, n_ubatch)
    sizes = []
    for layer in memory.layers:
        size_bytes = n_sequences * memory.state_elements * _F32_BYTES if layer.has_state else 0
        for head_dim in (header.head_dim_k, header.head_dim_v):
            n_blocks = -(-layer.n_heads_kv * head_dim // kv_type.block_elements)
            size_bytes += n_blocks * kv_type.block_bytes * (n_window_cells if layer.is_windowed else n_cells)
        sizes.append(size_bytes)
    return sizes


def _whole(count: int, step: int) -> int:
    """`count` rounded up to whole steps."""
    return -(-count // step) * step
