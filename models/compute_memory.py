"""The buffers in which llama.cpp computes a step, from the header and the shape of the graph.

Pure arithmetic, fitted to what llama.cpp reserves with flash attention: exact for the llama architecture with an f16
cache and up to a tenth high with a quantized one; up to a tenth high for models with windows or states.

Does not: count cells or weights (`memory`).
"""

from __future__ import annotations

from typing import NamedTuple

from localrun.models.header import Header
from localrun.models.layer_memory import ModelMemory

_F32_BYTES = 4
_MASK_ELEMENT_BYTES = 2


class Graph(NamedTuple):
    """`n_rows` of a step at most, `n_columns` of the attention masks together, `n_sequences` with a row of logits."""

    n_rows: int
    n_columns: int
    n_sequences: int


def compute_bytes(header: Header, memory: ModelMemory, graph: Graph) -> int:
    """The larger of the graph's peaks, and the rows of logits that are handed out.

    In a layer: the attention mask (f16), and per row three vectors of the feed-forward width and four of the model's
    width, with the queries besides where windows are mixed in; or the activations of a recurrent layer. At the end: one
    row of logits per sequence, besides the last hidden states. All as measured, see the module's text.
    """
    # The graph is reserved for rows that are shared evenly among all sequences.
    n_rows = -(-graph.n_rows // graph.n_sequences) * graph.n_sequences
    # A model without attention has no mask.
    has_mask = any(layer.n_heads_kv for layer in memory.layers)
    mask_bytes = n_rows * graph.n_columns * _MASK_ELEMENT_BYTES if has_mask else 0
    queries = header.n_heads * header.head_dim_k if memory.n_window else 0
    layer_width = 3 * header.n_ff + 4 * header.n_embd + queries
    peak_bytes = max(n_rows * layer_width, _recurrent_elements(header, memory, n_rows, graph.n_sequences)) * _F32_BYTES
    logits_bytes = graph.n_sequences * header.n_vocab * _F32_BYTES
    end_bytes = logits_bytes + (n_rows + graph.n_sequences) * header.n_embd * _F32_BYTES
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
