"""The smallest models that take every kernel a real one would, for the probe of the native library (`kernel_probe`).

One or two layers of each kind of memory, random weights, no vocabulary; all matrices of a file have one type, so that
what goes wrong has one name. The names, dimensions and metadata are those that llama.cpp asks of each architecture. The
same files come out each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

# Here, not at its first use: its modules swallow a KeyboardInterrupt that comes while they are imported.
from numpy.random import default_rng

from localrun.models.gguf.tables import BY_NAME, GgmlType

# --- random weights of one type, as bytes that can be tiled over tensors of any size ---
# A pool is a prime number of 32- or 256-element units, more than any tensor has rows. A tensor takes its bytes from the
# pool in order, going round, from a start of its own. Because the pool's length is prime and the row's is smaller, no
# two rows of a tensor start at the same place: all rows differ, though they are made of the same blocks. That is enough
# for tests of the runtime (finite outputs, no ties by construction); it is not how a trained matrix looks. Values have
# mean about 0 and standard deviation 1/sqrt(fan-in), so that activations keep their size from layer to layer.

Bytes = npt.NDArray[np.uint8]

# `kvalues_iq4nl` of ggml-common.h.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Each is prime. The smallest above the vocabulary size of a shape keeps small shapes quick to write.
_POOL_UNITS = (1_031, 8_209, 65_537, 262_147)

# Types whose elements are not grouped are drawn in units of this many.
_PLAIN_UNIT_ELEMENTS = 32


class BlockPool:
    """Random blocks of one type at one scale. `n_rows_max` is the most rows that a tensor made from it may have."""

    def __init__(self, tensor_type: GgmlType, fan_in: int, n_rows_max: int, rng: np.random.Generator) -> None:
        unit_elements = max(tensor_type.block_elements, _PLAIN_UNIT_ELEMENTS)
        n_units = next(units for units in _POOL_UNITS if units > n_rows_max)
        self._rng = rng
        self._n_units = n_units
        self._unit_bytes = unit_elements // tensor_type.block_elements * tensor_type.block_bytes
        self._bytes = _random_blocks(tensor_type, n_units * unit_elements, 1 / math.sqrt(fan_in), rng)

    def chunks(self, size_bytes: int) -> Iterator[Bytes]:
        """`size_bytes` bytes of blocks from a random start, in pieces that are views of the pool."""
        start = int(self._rng.integers(self._n_units)) * self._unit_bytes
        while size_bytes > 0:
            piece = self._bytes[start : start + size_bytes]
            yield piece
            size_bytes -= len(piece)
            start = 0


def _random_blocks(tensor_type: GgmlType, n_elements: int, std: float, rng: np.random.Generator) -> Bytes:
    if draw := _DRAWN.get(tensor_type.name):
        return draw(n_elements // tensor_type.block_elements, std, rng)
    # One row per block, because the quantizer works on rows. 64-bit normals would take twice the memory.
    values = rng.standard_normal(n_elements, dtype=np.float32).reshape(-1, _PLAIN_UNIT_ELEMENTS)
    values *= np.float32(std)
    quantized: npt.NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType(tensor_type.number))
    return quantized.view(np.uint8).reshape(-1)


def _random_q4_k(n_blocks: int, std: float, rng: np.random.Generator, *, n_bits: int = 4) -> Bytes:
    """Q4_K super-blocks, and with 5 bits Q5_K's.

    Layout (block_q4_K in ggml-common.h): fp16 d, fp16 dmin, 12 bytes with eight 6-bit scales and eight 6-bit minima,
    and the values' bits; weight = d * scale * q - dmin * minimum. With minimum = scale and dmin = 7.5 d, a uniform q in
    0..15 gives mean 0 and the standard deviation d * rms(scale) * sqrt((16^2 - 1) / 12).
    """
    n_values = 2**n_bits
    scales = rng.integers(32, 64, size=(n_blocks, 8), dtype=np.uint8)
    d = std / (_rms(32, 63) * math.sqrt((n_values**2 - 1) / 12))
    head = np.empty((n_blocks, 16), dtype=np.uint8)
    head[:, 0:4] = np.array([d, (n_values - 1) / 2 * d], dtype="<f2").view(np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    head[:, 4:8] = head[:, 8:12] = low | (high >> 4 << 6)
    head[:, 12:16] = (high & 15) | (high << 4)
    return np.hstack([head, rng.integers(0, 256, size=(n_blocks, 32 * n_bits), dtype=np.uint8)]).reshape(-1)


def _random_q6_k(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """Q6_K super-blocks.

    Layout (block_q6_K): 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 signed 8-bit scales, fp16 d;
    weight = d * scale * (q - 32). A uniform q in 0..63 has standard deviation sqrt((64^2 - 1) / 12); scales of both
    signs make the mean 0.
    """
    blocks = np.empty((n_blocks, 210), dtype=np.uint8)
    blocks[:, :192] = rng.integers(0, 256, size=(n_blocks, 192), dtype=np.uint8)
    scales = rng.integers(32, 64, size=(n_blocks, 16), dtype=np.int8)
    scales *= rng.choice(np.array([-1, 1], dtype=np.int8), size=scales.shape)
    blocks[:, 192:208] = scales.view(np.uint8)
    d = std / (_rms(32, 63) * math.sqrt(4095 / 12))
    blocks[:, 208:210] = np.array([d], dtype="<f2").view(np.uint8)
    return blocks.reshape(-1)


def _random_iq4_xs(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """IQ4_XS super-blocks.

    Layout (block_iq4_xs): fp16 d, 2 bytes with the high 2 bits of eight scales, 4 bytes with their low 4 bits, 128
    bytes of indices; weight = d * (scale - 32) * _IQ4_VALUES[index]. Scales of both signs make the mean 0.
    """
    scales = rng.integers(16, 32, size=(n_blocks, 8), dtype=np.uint8)
    scales = np.where(rng.integers(0, 2, size=scales.shape, dtype=np.uint8) > 0, scales, 64 - scales).astype(np.uint16)
    blocks = np.empty((n_blocks, 136), dtype=np.uint8)
    d = std / (_rms(1, 16) * math.sqrt(sum(value**2 for value in _IQ4_VALUES) / len(_IQ4_VALUES)))
    blocks[:, 0:2] = np.array([d], dtype="<f2").view(np.uint8)
    high = (scales >> 4 << 2 * np.arange(8, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    blocks[:, 2:4] = high.astype("<u2").view(np.uint8).reshape(-1, 2)
    blocks[:, 4:8] = (scales[:, 0::2] & 15) | (scales[:, 1::2] & 15) << 4
    blocks[:, 8:] = rng.integers(0, 256, size=(n_blocks, 128), dtype=np.uint8)
    return blocks.reshape(-1)


def _random_iq4_nl(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """IQ4_NL blocks: fp16 d, of both signs for a mean of 0, and 16 bytes of indices of `_IQ4_VALUES`."""
    blocks = rng.integers(0, 256, size=(n_blocks, 18), dtype=np.uint8)
    d = std / math.sqrt(sum(value**2 for value in _IQ4_VALUES) / len(_IQ4_VALUES))
    blocks[:, :2] = (d * rng.choice((-1, 1), size=n_blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def _random_q2_k(n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """Q2_K super-blocks: 16 bytes with a scale and a minimum of 4 bits each, 64 bytes of 2-bit values, fp16 d and dmin;
    weight = d * scale * q - dmin * minimum. With minimum = scale and dmin = 1.5 d a uniform q in 0..3 gives mean 0."""
    blocks = rng.integers(0, 256, size=(n_blocks, 84), dtype=np.uint8)
    blocks[:, :16] = rng.integers(8, 16, size=(n_blocks, 16), dtype=np.uint8) * 17
    d = std / (_rms(8, 15) * math.sqrt((4**2 - 1) / 12))
    blocks[:, 80:] = np.array([d, 1.5 * d], dtype="<f2").view(np.uint8)
    return blocks.reshape(-1)


# Drawn as bytes, because gguf-py cannot quantize to these.
_DRAWN: dict[str, Callable[[int, float, np.random.Generator], Bytes]] = {
    "Q2_K": _random_q2_k, "Q4_K": _random_q4_k, "Q5_K": partial(_random_q4_k, n_bits=5), "Q6_K": _random_q6_k,
    "IQ4_NL": _random_iq4_nl, "IQ4_XS": _random_iq4_xs,
}  # fmt: skip


def _rms(first: int, last: int) -> float:
    """Root mean square of the integers from `first` to `last`."""
    return math.sqrt(sum(n * n for n in range(first, last + 1)) / (last - first + 1))


# --- models ---

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
                    _write(path, model, BY_NAME[weight_type])
                    reference = path.with_stem(f"{path.stem}-F32") if model is PROBE_MODELS[0] else None
                    if reference:
                        _write(reference, model, BY_NAME[weight_type], as_f32=True)
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
        for kind in (weight_type if tensor.is_matrix else BY_NAME["F32"],)
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
