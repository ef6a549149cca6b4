"""The shapes of synthesized files: dimensions of real models, small ones of every memory kind, and their tensors.

Pure. The dimensions of the large ones are those that the published models state in their configuration. The small ones
exist so that tests can load every kind of memory that llama.cpp has: attention over everything, a sliding window, a
recurrent state, and the two mixed.

The names and dimensions of tensors are those that llama.cpp asks of each architecture. The choice of types follows what
its quantizer does for the file types Q4_0, Q4_K_M, Q8_0 and F16 without an importance matrix, so that a benchmark reads
as many bytes per token as a real file would.

Does not: write anything, or know metadata (`synthesize`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localrun.models.gguf.tables import BY_NAME, GgmlType


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """What a recurrent layer keeps of a sequence: `n_conv - 1` columns of a convolution, and a state if `n_state` > 0.

    `n_rank` is the rank of the time step (Mamba) or the number of value heads (gated delta net), `n_groups` its key
    heads, `n_inner` its inner width. A short convolution has none of these.
    """

    n_conv: int
    n_state: int = 0
    n_inner: int = 0
    n_rank: int = 0
    n_groups: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a model. `tied`: the embedding matrix is also the output matrix.

    Of every `attention_every` layers the last attends to everything; the others see `n_window` tokens or are recurrent.
    With `attention_every` 0 none attends. `n_nextn` layers more draft the tokens after the next one.
    """

    name: str
    architecture: str = "llama"
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
    attention_every: int = 1
    n_window: int = 0
    recurrence: Recurrence | None = None
    n_nextn: int = 0

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        if self.recurrence is None:
            return False
        return self.attention_every == 0 or (layer + 1) % self.attention_every != 0


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        # Wide enough (256) for real K-quant rows, and otherwise as small as tests like it.
        Shape(
            name="tiny", n_layers=4, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64, n_ff=768,
            n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True,
        ),
        # Six layers, because in Gemma 3 every sixth sees everything. The output has embeddings of its own: Gemma scales
        # the input's, and a tied matrix of random weights would then answer with the last token for ever.
        Shape(
            name="tiny-gemma3", architecture="gemma3", n_layers=6, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64,
            n_ff=512, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=False, attention_every=6,
            n_window=64,
        ),
        Shape(
            name="tiny-mamba", architecture="mamba", n_layers=4, n_embd=256, n_heads=0, n_heads_kv=0, head_dim=0,
            n_ff=0, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True, attention_every=0,
            recurrence=Recurrence(n_conv=4, n_state=16, n_inner=512, n_rank=16),
        ),
        # Attention in every fourth layer, gated delta nets in the others.
        Shape(
            name="tiny-qwen35", architecture="qwen35", n_layers=4, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64,
            n_ff=512, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True, attention_every=4,
            recurrence=Recurrence(n_conv=4, n_state=32, n_inner=128, n_rank=4, n_groups=2),
        ),
        # The same with a layer that drafts.
        Shape(
            name="tiny-qwen35-nextn", architecture="qwen35", n_layers=4, n_embd=256, n_heads=4, n_heads_kv=2,
            head_dim=64, n_ff=512, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=False,
            attention_every=4, recurrence=Recurrence(n_conv=4, n_state=32, n_inner=128, n_rank=4, n_groups=2),
            n_nextn=1,
        ),
        # Positions in parts. It has biases, and so differs from a llama with the same tensors.
        Shape(
            name="tiny-qwen2vl", architecture="qwen2vl", n_layers=4, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64,
            n_ff=768, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True,
        ),
        # Attention in every third layer, short convolutions in the others.
        Shape(
            name="tiny-lfm2", architecture="lfm2", n_layers=6, n_embd=256, n_heads=4, n_heads_kv=2, head_dim=64,
            n_ff=512, n_vocab=2048, n_ctx_train=4096, rope_freq_base=10_000.0, tied=True, attention_every=3,
            recurrence=Recurrence(n_conv=3),
        ),
        # SmolLM2-135M, but with room for what agents send.
        Shape(
            name="135m", n_layers=30, n_embd=576, n_heads=9, n_heads_kv=3, head_dim=64, n_ff=1536,
            n_vocab=49_152, n_ctx_train=32_768, rope_freq_base=100_000.0, tied=True,
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

# A state decays by softplus(bias) * A a step, here by 5 %: slow enough for a prompt's beginning to matter at its end.
_STATE_DECAY = -1.0
_TIME_STEP_BIAS = -3.0


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write. `shape` is in GGML's order: the row length (fan-in) first. `fill` is the value of all its
    elements; None means random ones."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    fill: float | None = None

    @property
    def n_rows(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def size_bytes(self) -> int:
        return self.shape[0] // self.type.block_elements * self.type.block_bytes * self.n_rows


class _Planner:
    """Makes the plans of one layer, in the types that its matrices get."""

    def __init__(self, shape: Shape, file_type: str, layer: int) -> None:
        self.shape = shape
        self._type = file_type
        is_sensitive = file_type == "Q4_K" and _gets_more_bits(layer, shape.n_layers)
        self._sensitive_type = "Q6_K" if is_sensitive else file_type
        self._prefix = f"blk.{layer}."

    def matrix(self, name: str, n_in: int, n_out: int, *, sensitive: bool = False) -> TensorPlan:
        wanted = self._sensitive_type if sensitive else self._type
        return TensorPlan(f"{self._prefix}{name}.weight", (n_in, n_out), _fitting(wanted, n_in))

    def kernel(self, name: str, n_columns: int, n_rows: int) -> TensorPlan:
        """A convolution's: too narrow to quantize."""
        return TensorPlan(f"{self._prefix}{name}.weight", (n_columns, n_rows), BY_NAME["F32"])

    def constant(self, name: str, fill: float, *dimensions: int) -> TensorPlan:
        return TensorPlan(self._prefix + name, dimensions, BY_NAME["F32"], fill)

    def norm(self, name: str, width: int) -> TensorPlan:
        return self.constant(f"{name}.weight", 1.0, width)


def plan_tensors(shape: Shape, file_type: str) -> Iterator[TensorPlan]:
    """The tensors of a file, in file order. `file_type` is a key of `TYPES`."""
    output_type = "Q6_K" if file_type in ("Q4_0", "Q4_K") else file_type
    embedding_type = output_type if shape.tied else file_type
    embedding = (shape.n_embd, shape.n_vocab)
    # llama.cpp looks for the last norm of this one architecture under the name that its first files had.
    norm = "token_embd_norm" if shape.architecture == "lfm2" else "output_norm"
    yield TensorPlan("token_embd.weight", embedding, _fitting(embedding_type, shape.n_embd))
    yield TensorPlan(f"{norm}.weight", (shape.n_embd,), BY_NAME["F32"], 1.0)
    if not shape.tied:
        yield TensorPlan("output.weight", embedding, _fitting(output_type, shape.n_embd))
    for layer in range(shape.n_layers):
        plan = _Planner(shape, file_type, layer)
        match shape.architecture:
            case "gemma3":
                yield from _gemma3_layer(plan)
            case "mamba":
                yield from _mamba_layer(plan)
            case "qwen35":
                yield from _qwen35_layer(plan, is_recurrent=shape.is_recurrent(layer))
            case "qwen2vl":
                yield from _llama_layer(plan)
                yield from _attention_biases(plan)
            case "lfm2":
                yield from _lfm2_layer(plan, is_recurrent=shape.is_recurrent(layer))
            case _:
                yield from _llama_layer(plan)
    for layer in range(shape.n_layers, shape.n_layers + shape.n_nextn):
        yield from _qwen35_nextn_layer(_Planner(shape, file_type, layer))


def _llama_layer(plan: _Planner) -> Iterator[TensorPlan]:
    yield plan.norm("attn_norm", plan.shape.n_embd)
    yield from _attention(plan)
    yield plan.norm("ffn_norm", plan.shape.n_embd)
    yield from _feed_forward(plan)


def _gemma3_layer(plan: _Planner) -> Iterator[TensorPlan]:
    yield plan.norm("attn_norm", plan.shape.n_embd)
    yield from _attention(plan)
    yield from _head_norms(plan)
    yield plan.norm("post_attention_norm", plan.shape.n_embd)
    yield plan.norm("ffn_norm", plan.shape.n_embd)
    yield from _feed_forward(plan)
    yield plan.norm("post_ffw_norm", plan.shape.n_embd)


def _mamba_layer(plan: _Planner) -> Iterator[TensorPlan]:
    shape, recurrence = plan.shape, plan.shape.recurrence
    assert recurrence is not None
    n_inner = recurrence.n_inner
    yield plan.norm("attn_norm", shape.n_embd)
    yield plan.matrix("ssm_in", shape.n_embd, 2 * n_inner)
    yield plan.kernel("ssm_conv1d", recurrence.n_conv, n_inner)
    yield plan.constant("ssm_conv1d.bias", 0.0, n_inner)
    yield plan.matrix("ssm_x", n_inner, recurrence.n_rank + 2 * recurrence.n_state)
    yield plan.kernel("ssm_dt", recurrence.n_rank, n_inner)
    yield plan.constant("ssm_dt.bias", _TIME_STEP_BIAS, n_inner)
    yield plan.constant("ssm_a", _STATE_DECAY, recurrence.n_state, n_inner)
    yield plan.constant("ssm_d", 1.0, n_inner)
    yield plan.matrix("ssm_out", n_inner, shape.n_embd)


def _qwen35_layer(plan: _Planner, *, is_recurrent: bool) -> Iterator[TensorPlan]:
    shape = plan.shape
    yield plan.norm("attn_norm", shape.n_embd)
    if is_recurrent:
        yield from _gated_delta_net(plan)
    else:
        # The query projection also makes the gate of the output.
        yield from _attention(plan, query_parts=2)
        yield from _head_norms(plan)
    yield plan.norm("post_attention_norm", shape.n_embd)
    yield from _feed_forward(plan)


def _qwen35_nextn_layer(plan: _Planner) -> Iterator[TensorPlan]:
    """It makes its input of a token and the hidden state of the one before, and shares the output matrix."""
    yield from _qwen35_layer(plan, is_recurrent=False)
    yield plan.matrix("nextn.eh_proj", 2 * plan.shape.n_embd, plan.shape.n_embd)
    yield plan.norm("nextn.enorm", plan.shape.n_embd)
    yield plan.norm("nextn.hnorm", plan.shape.n_embd)


def _gated_delta_net(plan: _Planner) -> Iterator[TensorPlan]:
    shape, recurrence = plan.shape, plan.shape.recurrence
    assert recurrence is not None
    n_inner, n_rank = recurrence.n_inner, recurrence.n_rank
    n_mixed = n_inner + 2 * recurrence.n_groups * recurrence.n_state
    yield plan.matrix("attn_qkv", shape.n_embd, n_mixed)
    yield plan.matrix("attn_gate", shape.n_embd, n_inner)
    yield plan.kernel("ssm_conv1d", recurrence.n_conv, n_mixed)
    yield plan.constant("ssm_dt.bias", _TIME_STEP_BIAS, n_rank)
    yield plan.constant("ssm_a", _STATE_DECAY, n_rank)
    yield plan.matrix("ssm_beta", shape.n_embd, n_rank)
    yield plan.matrix("ssm_alpha", shape.n_embd, n_rank)
    yield plan.norm("ssm_norm", recurrence.n_state)
    yield plan.matrix("ssm_out", n_inner, shape.n_embd)


def _lfm2_layer(plan: _Planner, *, is_recurrent: bool) -> Iterator[TensorPlan]:
    shape, recurrence = plan.shape, plan.shape.recurrence
    assert recurrence is not None
    yield plan.norm("attn_norm", shape.n_embd)
    if is_recurrent:
        yield plan.kernel("shortconv.conv", recurrence.n_conv, shape.n_embd)
        yield plan.matrix("shortconv.in_proj", shape.n_embd, 3 * shape.n_embd)
        yield plan.matrix("shortconv.out_proj", shape.n_embd, shape.n_embd)
    else:
        yield from _attention(plan)
        yield from _head_norms(plan)
    yield plan.norm("ffn_norm", shape.n_embd)
    yield from _feed_forward(plan)


def _attention(plan: _Planner, *, query_parts: int = 1) -> Iterator[TensorPlan]:
    shape = plan.shape
    q_width, kv_width = shape.n_heads * shape.head_dim, shape.n_heads_kv * shape.head_dim
    yield plan.matrix("attn_q", shape.n_embd, q_width * query_parts)
    yield plan.matrix("attn_k", shape.n_embd, kv_width)
    yield plan.matrix("attn_v", shape.n_embd, kv_width, sensitive=True)
    yield plan.matrix("attn_output", q_width, shape.n_embd)


def _attention_biases(plan: _Planner) -> Iterator[TensorPlan]:
    for name, n_heads in (("q", plan.shape.n_heads), ("k", plan.shape.n_heads_kv), ("v", plan.shape.n_heads_kv)):
        yield plan.constant(f"attn_{name}.bias", 0.0, n_heads * plan.shape.head_dim)


def _head_norms(plan: _Planner) -> Iterator[TensorPlan]:
    yield plan.norm("attn_q_norm", plan.shape.head_dim)
    yield plan.norm("attn_k_norm", plan.shape.head_dim)


def _feed_forward(plan: _Planner) -> Iterator[TensorPlan]:
    shape = plan.shape
    yield plan.matrix("ffn_gate", shape.n_embd, shape.n_ff)
    yield plan.matrix("ffn_up", shape.n_embd, shape.n_ff)
    yield plan.matrix("ffn_down", shape.n_ff, shape.n_embd, sensitive=True)


def _fitting(wanted: str, row_elements: int) -> GgmlType:
    wanted_type = BY_NAME[wanted]
    if row_elements % wanted_type.block_elements == 0:
        return wanted_type
    return BY_NAME[_FALLBACKS[wanted]]


def _gets_more_bits(layer: int, n_layers: int) -> bool:
    """Whether Q4_K_M spends 6 bits on this layer's value and down projections: the first and last eighth of the
    layers, and every third between them."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
