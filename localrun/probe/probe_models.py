"""The smallest models that take every kernel a real one would, for the probe of the native library (`kernel_probe`).

One or two layers of each kind of memory, random weights, no vocabulary; all matrices of a file have one type, so that
what goes wrong has one name. The names, dimensions and metadata are those that llama.cpp asks of each architecture. The
same files come out each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

# Here, not at its first use: its modules swallow a KeyboardInterrupt that comes while they are imported.
from numpy.random import default_rng

from localrun.models.gguf.ggml_types import GgmlType, by_name
from localrun.probe.random_blocks import BlockPool

# What published files are made of, the mixes and gpt-oss's included, and whatever else has quick kernels somewhere.
WEIGHT_TYPES = ("F16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")

_ALIGNMENT = 32
# Wide enough for rows of K-quants.
_N_EMBD = _N_FF = 256
_HEAD, _N_KV = 64, 128
_N_VOCAB = 512
# A state decays by softplus(bias) * A a step, here by 5 %: slow enough for a prompt's beginning to matter at its end.
_STATE_DECAY, _TIME_STEP_BIAS = -1.0, -3.0


class _Tensor(NamedTuple):
    """`shape` is in GGML's order: the row length (fan-in) first. `fill` is the value of all elements; None means random
    ones. Only a matrix has the file's type; a convolution is too narrow, and vectors are small."""

    name: str
    shape: tuple[int, ...]
    fill: float | None = None
    is_matrix: bool = False


def _matrix(name: str, n_in: int, n_out: int) -> _Tensor:
    return _Tensor(f"{name}.weight", (n_in, n_out), is_matrix=True)


def _norm(name: str, width: int = _N_EMBD) -> _Tensor:
    return _Tensor(f"{name}.weight", (width,), 1.0)


def _attention(*, query_parts: int = 1) -> tuple[_Tensor, ...]:
    return (
        _matrix("attn_q", _N_EMBD, _N_EMBD * query_parts), _matrix("attn_k", _N_EMBD, _N_KV),
        _matrix("attn_v", _N_EMBD, _N_KV), _matrix("attn_output", _N_EMBD, _N_EMBD),
    )  # fmt: skip


_HEAD_NORMS = (_norm("attn_q_norm", _HEAD), _norm("attn_k_norm", _HEAD))
_FEED_FORWARD = (
    _matrix("ffn_gate", _N_EMBD, _N_FF), _matrix("ffn_up", _N_EMBD, _N_FF), _matrix("ffn_down", _N_FF, _N_EMBD),
)  # fmt: skip
_POST_NORM = _norm("post_attention_norm")

_LLAMA = (_norm("attn_norm"), *_attention(), _norm("ffn_norm"), *_FEED_FORWARD)
_GEMMA3 = (
    _norm("attn_norm"), *_attention(), *_HEAD_NORMS, _POST_NORM, _norm("ffn_norm"), *_FEED_FORWARD,
    _norm("post_ffw_norm"),
)  # fmt: skip
_MAMBA = (
    _norm("attn_norm"), _matrix("ssm_in", _N_EMBD, 1024), _Tensor("ssm_conv1d.weight", (4, 512)),
    _Tensor("ssm_conv1d.bias", (512,), 0.0), _matrix("ssm_x", 512, 48), _Tensor("ssm_dt.weight", (16, 512)),
    _Tensor("ssm_dt.bias", (512,), _TIME_STEP_BIAS), _Tensor("ssm_a", (16, 512), _STATE_DECAY),
    _Tensor("ssm_d", (512,), 1.0), _matrix("ssm_out", 512, _N_EMBD),
)  # fmt: skip
# The query projection also makes the gate of the output.
_QWEN35 = (_norm("attn_norm"), *_attention(query_parts=2), *_HEAD_NORMS, _POST_NORM, *_FEED_FORWARD)
_DELTA_NET = (
    _norm("attn_norm"), _matrix("attn_qkv", _N_EMBD, 512), _matrix("attn_gate", _N_EMBD, 256),
    _Tensor("ssm_conv1d.weight", (4, 512)), _Tensor("ssm_dt.bias", (4,), _TIME_STEP_BIAS),
    _Tensor("ssm_a", (4,), _STATE_DECAY), _matrix("ssm_beta", _N_EMBD, 4), _matrix("ssm_alpha", _N_EMBD, 4),
    _norm("ssm_norm", 64), _matrix("ssm_out", 256, _N_EMBD), _POST_NORM, *_FEED_FORWARD,
)  # fmt: skip
_LFM2 = (_norm("attn_norm"), *_attention(), *_HEAD_NORMS, _norm("ffn_norm"), *_FEED_FORWARD)
_SHORT_CONVOLUTION = (
    _norm("attn_norm"), _Tensor("shortconv.conv.weight", (3, _N_EMBD)), _matrix("shortconv.in_proj", _N_EMBD, 768),
    _matrix("shortconv.out_proj", _N_EMBD, _N_EMBD), _norm("ffn_norm"), *_FEED_FORWARD,
)  # fmt: skip

Value = int | float | list[int]
_COMMON: Mapping[str, Value] = {
    "context_length": 256, "embedding_length": _N_EMBD, "feed_forward_length": _N_FF, "vocab_size": _N_VOCAB,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count": 4, "attention.head_count_kv": 2,
    "attention.key_length": _HEAD, "attention.value_length": _HEAD, "rope.dimension_count": _HEAD,
    "rope.freq_base": 10_000.0,
}  # fmt: skip


class _Model(NamedTuple):
    """`memory` is what `memory.memory_kind` says of it."""

    memory: str
    architecture: str
    layers: tuple[tuple[_Tensor, ...], ...]
    facts: Mapping[str, Value]


# In the order in which they are probed. Hybrids differ in what their other layers are.
PROBE_MODELS = (
    _Model("attention", "llama", (_LLAMA,), _COMMON),
    _Model("window", "gemma3", (_GEMMA3, _GEMMA3), {**_COMMON, "attention.sliding_window": 32}),
    _Model(
        "recurrent", "mamba", (_MAMBA,),
        {
            "context_length": 256, "embedding_length": _N_EMBD, "feed_forward_length": 0, "vocab_size": _N_VOCAB,
            "attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count": 0, "ssm.conv_kernel": 4,
            "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 16,
        },
    ),
    _Model(
        "hybrid", "qwen35", (_DELTA_NET, _QWEN35),
        {
            **_COMMON, "rope.dimension_sections": [12, 10, 10, 0], "ssm.conv_kernel": 4, "ssm.inner_size": 256,
            "ssm.state_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2, "full_attention_interval": 2,
        },
    ),
    # No key head marks a layer as recurrent.
    _Model(
        "hybrid", "lfm2", (_SHORT_CONVOLUTION, _LFM2),
        {**_COMMON, "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
)  # fmt: skip


def write_probe_models(folder: Path) -> Iterator[tuple[str, str, Path, Path | None]]:
    """Writes them all to a folder, one by one: weight type, kind of memory, the file, and for the first kind of memory
    one with the same weights as F32."""
    for memory in dict.fromkeys(model.memory for model in PROBE_MODELS):
        for weight_type in WEIGHT_TYPES:
            for model in PROBE_MODELS:
                if model.memory == memory:
                    path = folder / f"probe-{model.architecture}-{weight_type}.gguf"
                    _write(path, model, by_name(weight_type))
                    reference = path.with_stem(f"{path.stem}-F32") if model is PROBE_MODELS[0] else None
                    if reference:
                        _write(reference, model, by_name(weight_type), as_f32=True)
                    yield weight_type, memory, path, reference


def _tensors(model: _Model) -> list[_Tensor]:
    # llama.cpp looks for the last norm of this one architecture under the name that its first files had.
    norm = "token_embd_norm" if model.architecture == "lfm2" else "output_norm"
    tensors = [_matrix("token_embd", _N_EMBD, _N_VOCAB), _norm(norm)]
    for number, layer in enumerate(model.layers):
        tensors += [tensor._replace(name=f"blk.{number}.{tensor.name}") for tensor in layer]
    return tensors


def _write(path: Path, model: _Model, weight_type: GgmlType, *, as_f32: bool = False) -> None:
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_quantization_version(2)
    writer.add_block_count(len(model.layers))
    for key, value in model.facts.items():
        name = f"{model.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model("no_vocab")
    tensors = [
        (tensor, kind, math.prod(tensor.shape) // kind.block_elements * kind.block_bytes)
        for tensor in _tensors(model)
        for kind in (weight_type if tensor.is_matrix else by_name("F32"),)
    ]
    for tensor, kind, size_bytes in tensors:
        number = gguf.GGMLQuantizationType.F32 if as_f32 else gguf.GGMLQuantizationType(kind.number)
        n_bytes = 4 * math.prod(tensor.shape) if as_f32 else size_bytes
        writer.add_tensor_info(tensor.name, tensor.shape[::-1], np.dtype(np.float32), n_bytes, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    rng = default_rng(0)
    pools: dict[tuple[str, int], BlockPool] = {}
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        for tensor, kind, size_bytes in tensors:
            if tensor.fill is not None:
                file.write(np.full(math.prod(tensor.shape), tensor.fill, dtype="<f4").tobytes())
            else:
                rows = (kind.name, tensor.shape[0])
                if rows not in pools:
                    pools[rows] = BlockPool(kind, tensor.shape[0], 1024, rng)
                number = gguf.GGMLQuantizationType(kind.number)
                for chunk in pools[rows].chunks(size_bytes):
                    file.write((gguf.quants.dequantize(chunk, number) if as_f32 else chunk).data)
            file.write(bytes(-file.tell() % _ALIGNMENT))
