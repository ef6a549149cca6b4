"""How much memory an engine needs that computes embeddings, from the header alone.

Pure arithmetic, as `memory` has it for text. An engine for embeddings differs in three ways: every row is an output, so
there is a row of logits for each (llama.cpp keeps the place for them also where a model has none); an encoder has no
KV cache; and what it reads at once is a whole text, not a piece of one.
"""

from __future__ import annotations

from typing import Final

from localrun.models.ggml_types import by_name
from localrun.models.header import Header
from localrun.models.layer_memory import model_memory
from localrun.models.memory import MemoryEstimate, process_bytes
from localrun.models.pooling import ENCODERS, is_bidirectional

# Tokens of one input: where a text is computed in one piece its memory grows with the square, and where it is not the
# KV cache does. Ollama's default batch for embeddings is the former.
MOST_WHOLE_TOKENS: Final = 2_048
MOST_TOKENS: Final = 8_192
# Inputs of one step where each has a state of its own; as the engine has it.
STATEFUL_SEQUENCES: Final = 8

_F32_BYTES = 4
# A mask in f32, and a copy in f16 for flash attention.
_MASK_ELEMENT_BYTES = 6


def most_tokens(header: Header, n_cells: int = 0) -> int:
    """The longest input that an engine is opened for; `n_cells` asks for another limit than the usual one."""
    usual = MOST_WHOLE_TOKENS if is_bidirectional(header) else MOST_TOKENS
    return min(header.n_ctx_train, n_cells or usual)


def estimate(header: Header, *, n_tokens: int, n_rows: int, kv_type: str) -> MemoryEstimate:
    """Memory of one engine whose inputs have up to `n_tokens`, in steps of `n_rows`."""
    n_rows = max(n_rows, n_tokens) if is_bidirectional(header) else n_rows
    n_cells = 0 if header.architecture in ENCODERS else n_tokens + n_rows
    row_bytes = (3 * header.n_ff + 6 * header.n_embd + 2 * header.n_vocab) * _F32_BYTES
    if header.architecture in ENCODERS:
        row_bytes -= header.n_vocab * _F32_BYTES  # they compute no logits
    mask_bytes = n_rows * max(n_rows, n_cells) * _MASK_ELEMENT_BYTES
    return MemoryEstimate(
        weights_bytes=header.weights_bytes,
        kv_bytes=_kv_bytes(header, n_cells, kv_type),
        compute_bytes=mask_bytes + n_rows * row_bytes,
        process_bytes=process_bytes(header),
    )


def _kv_bytes(header: Header, n_cells: int, kv_type: str) -> int:
    if not n_cells:
        return 0
    row_type = by_name(kv_type.upper())
    memory = model_memory(header, n_kv_cells=n_cells)
    n_elements = sum(layer.n_heads_kv for layer in memory.layers) * (header.head_dim_k + header.head_dim_v)
    n_states = STATEFUL_SEQUENCES * sum(layer.has_state for layer in memory.layers)
    cell_bytes = -(-n_elements // row_type.block_elements) * row_type.block_bytes
    return cell_bytes * n_cells + n_states * memory.state_elements * _F32_BYTES
