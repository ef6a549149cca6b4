"""Which tensors a synthesized file has, in which types, and what they are filled with. Pure.

The names and dimensions are those that llama.cpp asks of each architecture. The choice of types follows what its
quantizer does for the file types Q4_0, Q4_K_M, Q8_0 and F16 without an importance matrix, so that a benchmark reads as
many bytes per token as a real file would.

Does not: write anything, or know metadata (`synthesize`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localrun.models.ggml_types import GgmlType, by_name
from localrun.models.shapes import Shape

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
        return TensorPlan(f"{self._prefix}{name}.weight", (n_columns, n_rows), by_name("F32"))

    def constant(self, name: str, fill: float, *dimensions: int) -> TensorPlan:
        return TensorPlan(self._prefix + name, dimensions, by_name("F32"), fill)

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
    yield TensorPlan(f"{norm}.weight", (shape.n_embd,), by_name("F32"), 1.0)
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
            case "lfm2":
                yield from _lfm2_layer(plan, is_recurrent=shape.is_recurrent(layer))
            case _:
                yield from _llama_layer(plan)


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


def _head_norms(plan: _Planner) -> Iterator[TensorPlan]:
    yield plan.norm("attn_q_norm", plan.shape.head_dim)
    yield plan.norm("attn_k_norm", plan.shape.head_dim)


def _feed_forward(plan: _Planner) -> Iterator[TensorPlan]:
    shape = plan.shape
    yield plan.matrix("ffn_gate", shape.n_embd, shape.n_ff)
    yield plan.matrix("ffn_up", shape.n_embd, shape.n_ff)
    yield plan.matrix("ffn_down", shape.n_ff, shape.n_embd, sensitive=True)


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
