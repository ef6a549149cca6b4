"""How much memory an engine will need for a model, from the header alone.

Pure arithmetic. Weights and KV cache follow from the tensors and dimensions exactly. The compute buffers are a formula
fitted to what llama.cpp reserves for the llama architecture with flash attention and one unified KV pool; it is exact
there for an f16 cache, and up to a tenth high for a quantized one.

Not modelled, and therefore too high: sliding-window layers (counted as if they kept the whole context), layers that
share a KV cache, and compressed attention (MLA). Not modelled, and therefore too low: the state of recurrent layers,
activations of mixtures of experts that are wider than the stated feed-forward width, attention without flash
attention, a second copy of tied embeddings on a GPU, and the engine process itself (about 100 MB).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from localrun.errors import BadRequest

from .ggml_types import GgmlType, by_name
from .header import Header

# The engine's context has more sequence ids than slots, for prefixes that wait in the cache; llama.cpp keeps a row of
# logits for each id.
SPARE_SEQUENCES: Final = 64
MAX_SEQUENCES: Final = 256

# llama_context rounds n_ctx up to this many cells.
_CELL_STEP = 256
_F32_BYTES = 4
_MASK_ELEMENT_BYTES = 2

_KV_TYPES = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


class MemoryEstimate(NamedTuple):
    """Bytes. Weights are mapped from the file, so the system can drop them under pressure; the rest it cannot."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


def estimate(header: Header, *, n_kv_cells: int, n_slots: int, n_ubatch: int, kv_type: str) -> MemoryEstimate:
    """Memory of one engine with `n_slots` slots, a pool of `n_kv_cells`, and steps of at most `n_ubatch` rows.

    `kv_type` is f16, q8_0 or q4_0. Raises BadRequest for another one.
    """
    if kv_type not in _KV_TYPES:
        raise BadRequest(f"unknown KV cache type '{kv_type}'; use one of {', '.join(_KV_TYPES)}", field="kv_type")
    n_cells = -(-n_kv_cells // _CELL_STEP) * _CELL_STEP
    return MemoryEstimate(
        weights_bytes=header.weights_bytes,
        kv_bytes=_kv_bytes(header, n_cells, by_name(_KV_TYPES[kv_type])),
        compute_bytes=_compute_bytes(header, n_cells, min(n_slots + SPARE_SEQUENCES, MAX_SEQUENCES), n_ubatch),
    )


def _kv_bytes(header: Header, n_cells: int, kv_type: GgmlType) -> int:
    """One row of keys and one of values per cell and layer. Layers without attention have no heads, so no rows."""
    bytes_per_cell = 0
    for n_heads in header.heads_kv_per_layer:
        for head_dim in (header.head_dim_k, header.head_dim_v):
            n_blocks = -(-n_heads * head_dim // kv_type.block_elements)
            bytes_per_cell += n_blocks * kv_type.block_bytes
    return n_cells * bytes_per_cell


def _compute_bytes(header: Header, n_cells: int, n_outputs: int, n_rows: int) -> int:
    """The larger of the graph's two peaks, and the rows of logits that are handed out.

    In a layer: the attention mask (f16), three vectors of the feed-forward width and four of the model's width per row.
    At the end: one row of logits per output, besides the last hidden states. Both as measured, see the module's text.
    """
    # The graph is reserved for rows that are shared evenly among all sequences.
    n_rows = -(-n_rows // n_outputs) * n_outputs
    mask_bytes = n_rows * n_cells * _MASK_ELEMENT_BYTES
    layer_bytes = mask_bytes + n_rows * (3 * header.n_ff + 4 * header.n_embd) * _F32_BYTES
    logits_bytes = n_outputs * header.n_vocab * _F32_BYTES
    end_bytes = logits_bytes + (n_rows + n_outputs) * header.n_embd * _F32_BYTES
    return max(layer_bytes, end_bytes) + logits_bytes
