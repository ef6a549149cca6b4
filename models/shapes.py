"""Shapes of real models, and which tensor types a quantized file of such a shape would have.

Pure data and arithmetic, used by `synthesize`. The dimensions are those that the published models state in their
configuration. The choice of tensor types follows what llama.cpp's quantizer does for the file types Q4_0, Q4_K_M,
Q8_0 and F16 without an importance matrix, so that a benchmark reads as many bytes per token as a real file would.

Does not: know about tokens, or write anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .ggml_types import GgmlType, by_name


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a model of the llama architecture. `tied`: the embedding matrix is also the output matrix."""

    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    rope_freq_base: float
    tied: bool


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write. `shape` is in GGML's order: the row length (fan-in) first. 1-D tensors are norms."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType

    @property
    def n_rows(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def size_bytes(self) -> int:
        return self.shape[0] // self.type.block_elements * self.type.block_bytes * self.n_rows


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        # Wide enough (256) for real K-quant rows, and otherwise as small as tests like it.
        Shape(
            name="tiny", n_layers=4, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64, n_ff=768,
            n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True,
        ),
        # SmolLM2-135M.
        Shape(
            name="135m", n_layers=30, n_embd=576, n_heads=9, n_heads_kv=3, head_dim=64, n_ff=1536,
            n_vocab=49_152, n_ctx_train=8192, rope_freq_base=100_000.0, tied=True,
        ),
        # Qwen2.5-0.5B without its attention biases, which the llama architecture does not have.
        Shape(
            name="0.5b", n_layers=24, n_embd=896, n_heads=14, n_heads_kv=2, head_dim=64, n_ff=4864,
            n_vocab=151_936, n_ctx_train=32_768, rope_freq_base=1_000_000.0, tied=True,
        ),
        # Llama-3.2-1B.
        Shape(
            name="1b", n_layers=16, n_embd=2048, n_heads=32, n_heads_kv=8, head_dim=64, n_ff=8192,
            n_vocab=128_256, n_ctx_train=131_072, rope_freq_base=500_000.0, tied=True,
        ),
        # Llama-3.1-8B.
        Shape(
            name="8b", n_layers=32, n_embd=4096, n_heads=32, n_heads_kv=8, head_dim=128, n_ff=14_336,
            n_vocab=128_256, n_ctx_train=131_072, rope_freq_base=500_000.0, tied=False,
        ),
    )
}  # fmt: skip

# The file types, with their number in `general.file_type` (enum llama_ftype). Q4_K is written as the mix Q4_K_M.
TYPES: dict[str, int] = {"Q4_0": 2, "Q4_K": 15, "Q8_0": 7, "F16": 1}

# A row must be whole blocks. llama.cpp's quantizer falls back from a type with 256-element blocks to these.
_FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def plan_tensors(shape: Shape, file_type: str) -> Iterator[TensorPlan]:
    """The tensors of a file, in file order. `file_type` is a key of `TYPES`."""
    norm = by_name("F32")
    q_width = shape.n_heads * shape.head_dim
    kv_width = shape.n_heads_kv * shape.head_dim
    output_type = "Q6_K" if file_type in ("Q4_0", "Q4_K") else file_type

    def matrix(name: str, n_in: int, n_out: int, wanted: str = file_type) -> TensorPlan:
        return TensorPlan(name, (n_in, n_out), _fitting(wanted, n_in))

    yield matrix("token_embd.weight", shape.n_embd, shape.n_vocab, output_type if shape.tied else file_type)
    yield TensorPlan("output_norm.weight", (shape.n_embd,), norm)
    if not shape.tied:
        yield matrix("output.weight", shape.n_embd, shape.n_vocab, output_type)
    for layer in range(shape.n_layers):
        sensitive = "Q6_K" if file_type == "Q4_K" and _gets_more_bits(layer, shape.n_layers) else file_type
        yield TensorPlan(f"blk.{layer}.attn_norm.weight", (shape.n_embd,), norm)
        yield matrix(f"blk.{layer}.attn_q.weight", shape.n_embd, q_width)
        yield matrix(f"blk.{layer}.attn_k.weight", shape.n_embd, kv_width)
        yield matrix(f"blk.{layer}.attn_v.weight", shape.n_embd, kv_width, sensitive)
        yield matrix(f"blk.{layer}.attn_output.weight", q_width, shape.n_embd)
        yield TensorPlan(f"blk.{layer}.ffn_norm.weight", (shape.n_embd,), norm)
        yield matrix(f"blk.{layer}.ffn_gate.weight", shape.n_embd, shape.n_ff)
        yield matrix(f"blk.{layer}.ffn_up.weight", shape.n_embd, shape.n_ff)
        yield matrix(f"blk.{layer}.ffn_down.weight", shape.n_ff, shape.n_embd, sensitive)


def _fitting(wanted: str, row_elements: int) -> GgmlType:
    wanted_type = by_name(wanted)
    if row_elements % wanted_type.block_elements == 0:
        return wanted_type
    return by_name(_FALLBACKS[wanted])


def _gets_more_bits(layer: int, n_layers: int) -> bool:
    """Whether Q4_K_M spends 6 bits on this layer's value and down projections: the first and last eighth of the
    layers, and every third between them."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
