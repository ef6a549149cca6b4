"""How much memory an engine will need for a model, from the header alone.

Pure arithmetic. Weights, KV cache and recurrent states follow from the tensors and dimensions exactly, as far as
`layer_memory` knows the architecture. The compute buffers are a formula fitted to what llama.cpp reserves with flash
attention and one unified KV pool; for the llama architecture it is exact with an f16 cache and up to a tenth high with
a quantized one, for models with windows or states up to a tenth high.

Not modelled, and therefore too high: layers that share a KV cache, and compressed attention (MLA). Not modelled, and
therefore too low: activations of mixtures of experts that are wider than the stated feed-forward width, attention
without flash attention, a second copy of tied embeddings on a GPU, and the engine process itself (about 100 MB).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from localrun.errors import BadRequest

from .ggml_types import GgmlType, by_name
from .header import Header
from .layer_memory import ModelMemory, model_memory

# The engine's context has more sequence ids than slots, for prefixes that wait in the cache; llama.cpp keeps a row of
# logits for each id.
SPARE_SEQUENCES: Final = 64
MAX_SEQUENCES: Final = 256
# On a CPU long prompts are computed in a second context, this many at once, in batches of so many times the rows.
STAGING_SEQUENCES: Final = 4
STAGING_BATCHES: Final = 2

# llama_context rounds n_ctx up to this many cells, and llama_kv_cache_iswa the cells of windows.
_CELL_STEP = 256
_F32_BYTES = 4
_MASK_ELEMENT_BYTES = 2

_KV_TYPES = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


class MemoryEstimate(NamedTuple):
    """Bytes. Weights are mapped from the file, so the system can drop them under pressure; the rest it cannot.

    `staging_bytes` is for long prompts in the background: cells and buffers that no GPU engine has, and that take real
    memory only as far as prompts were that long.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    staging_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.staging_bytes


def estimate(header: Header, *, n_kv_cells: int, n_slots: int, n_ubatch: int, kv_type: str) -> MemoryEstimate:
    """Memory of one engine with `n_slots` slots, a pool of `n_kv_cells`, and steps of at most `n_ubatch` rows.

    `kv_type` is f16, q8_0 or q4_0. Raises BadRequest for another one.
    """
    if kv_type not in _KV_TYPES:
        raise BadRequest(f"unknown KV cache type '{kv_type}'; use one of {', '.join(_KV_TYPES)}", field="kv_type")
    n_cells = _whole(n_kv_cells, _CELL_STEP)
    memory = model_memory(header, n_kv_cells=n_cells)
    # Where nothing can be shared there is a sequence per slot, and each costs a window or a state.
    n_sequences = min(n_slots + SPARE_SEQUENCES, MAX_SEQUENCES) if memory.is_shareable else n_slots
    n_window_cells = min(n_cells, _whole(memory.n_window * n_sequences + n_ubatch, _CELL_STEP))
    kv_type_row = by_name(_KV_TYPES[kv_type])
    n_states = n_sequences * sum(layer.has_state for layer in memory.layers)
    kv_bytes = _kv_bytes(header, memory, n_cells, n_window_cells, kv_type_row)
    is_staged = memory.is_shareable and n_slots > 1
    return MemoryEstimate(
        weights_bytes=header.weights_bytes,
        kv_bytes=kv_bytes + n_states * memory.state_elements * _F32_BYTES,
        staging_bytes=_staging_bytes(header, kv_bytes, n_cells, n_slots, n_ubatch) if is_staged else 0,
        compute_bytes=_compute_bytes(
            header,
            n_mask_columns=n_cells + (n_window_cells if memory.n_window else 0),
            n_outputs=n_sequences,
            n_rows=n_ubatch,
            memory=memory,
        ),
    )


def _staging_bytes(header: Header, kv_bytes: int, n_cells: int, n_slots: int, n_ubatch: int) -> int:
    """Its streams are as long as a slot's. No row of it has logits."""
    n_rows = STAGING_BATCHES * n_ubatch
    mask_bytes = n_rows * (n_cells // n_slots) * _MASK_ELEMENT_BYTES
    layer_bytes = n_rows * (3 * header.n_ff + 4 * header.n_embd) * _F32_BYTES
    return kv_bytes * min(STAGING_SEQUENCES, n_slots) // n_slots + mask_bytes + layer_bytes


def _kv_bytes(header: Header, memory: ModelMemory, n_cells: int, n_window_cells: int, kv_type: GgmlType) -> int:
    """One row of keys and one of values per cell and layer. Layers without attention have no heads, so no rows."""
    size_bytes = 0
    for layer in memory.layers:
        for head_dim in (header.head_dim_k, header.head_dim_v):
            n_blocks = -(-layer.n_heads_kv * head_dim // kv_type.block_elements)
            size_bytes += n_blocks * kv_type.block_bytes * (n_window_cells if layer.is_windowed else n_cells)
    return size_bytes


def _compute_bytes(header: Header, *, n_mask_columns: int, n_outputs: int, n_rows: int, memory: ModelMemory) -> int:
    """The larger of the graph's peaks, and the rows of logits that are handed out.

    In a layer: the attention mask (f16), and per row three vectors of the feed-forward width and four of the model's
    width, with the queries besides where windows are mixed in; or the activations of a recurrent layer. At the end: one
    row of logits per output, besides the last hidden states. All as measured, see the module's text.
    """
    # The graph is reserved for rows that are shared evenly among all sequences.
    n_rows = _whole(n_rows, n_outputs)
    # A model without attention has no mask.
    mask_bytes = (
        n_rows * n_mask_columns * _MASK_ELEMENT_BYTES if any(layer.n_heads_kv for layer in memory.layers) else 0
    )
    queries = header.n_heads * header.head_dim_k if memory.n_window else 0
    layer_width = 3 * header.n_ff + 4 * header.n_embd + queries
    peak_bytes = max(n_rows * layer_width, _recurrent_elements(header, memory, n_rows, n_outputs)) * _F32_BYTES
    logits_bytes = n_outputs * header.n_vocab * _F32_BYTES
    end_bytes = logits_bytes + (n_rows + n_outputs) * header.n_embd * _F32_BYTES
    return max(mask_bytes + peak_bytes, end_bytes) + logits_bytes


def _recurrent_elements(header: Header, memory: ModelMemory, n_rows: int, n_sequences: int) -> int:
    """Activations in a layer with a state: some vectors of its inner width per row, and its states in and out."""
    n_inner, n_state = header.count("ssm.inner_size"), header.count("ssm.state_size")
    n_mixed = n_inner + 2 * header.count("ssm.group_count") * n_state
    if not memory.state_elements or not n_inner:
        return 0
    is_selective = header.count("ssm.group_count") == 0
    per_row = 6 * n_inner + header.count("ssm.time_step_rank") + 2 * n_state if is_selective else 3 * n_mixed + n_inner
    return n_rows * (per_row + header.n_embd) + 2 * n_sequences * memory.state_elements


def _whole(count: int, step: int) -> int:
    """`count` rounded up to whole steps."""
    return -(-count // step) * step
