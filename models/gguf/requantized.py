"""A model in another quantization: the sizes that its tensors would have. Pure.

Types are chosen as llama.cpp's quantizer does it without an importance matrix: the output matrix gets 6 bits, in the
mixes called M so do value and down projections of the layers that are worth it, and a row that is no whole number of
blocks falls back to a type with smaller ones. What is kept in 32 bits stays so.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from localrun.errors import BadRequest, meant
from localrun.models.gguf.ggml_types import FILE_TYPES, QUANT_ALIASES, by_name
from localrun.models.gguf.header import Header, TensorInfo


class _Mix(NamedTuple):
    """Types of usual matrices, of those that are worth more in some layers, and of the output."""

    usual: str
    better: str
    output: str


MIXES = {
    "Q4_0": _Mix("Q4_0", "Q4_0", "Q6_K"),
    "Q4_K_M": _Mix("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": _Mix("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": _Mix("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": _Mix("Q8_0", "Q8_0", "Q8_0"),
    "F16": _Mix("F16", "F16", "F16"),
}
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q4_0": "F16", "Q8_0": "F16"}
_WORTH_MORE = ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight", "ffn_down_exps.weight")


def quantization(text: str) -> str:
    """Its name in `MIXES`. Raises BadRequest."""
    name = QUANT_ALIASES.get(text.upper(), text.upper())
    if name not in MIXES:
        way_out = meant(name, MIXES) or f"it is one of {', '.join(MIXES)}"
        raise BadRequest(f"sizes in '{text}' are not known; {way_out}", field="quantization")
    return name


def requantized(header: Header, name: str) -> Header:
    """The same model in one of `MIXES`. Raises BadRequest."""
    name = quantization(name)
    mix, is_tied = MIXES[name], all(tensor.name != "output.weight" for tensor in header.tensors)
    tensors = tuple(_tensor(tensor, mix, header.n_layers, is_tied=is_tied) for tensor in header.tensors)
    more = sum(tensor.size_bytes for tensor in tensors) - sum(tensor.size_bytes for tensor in header.tensors)
    file_type = next(number for number, said in FILE_TYPES.items() if said == name)
    metadata = {**header.metadata, "general.file_type": file_type}
    return dataclasses.replace(header, tensors=tensors, size_bytes=header.size_bytes + more, metadata=metadata)


def _tensor(tensor: TensorInfo, mix: _Mix, n_layers: int, *, is_tied: bool) -> TensorInfo:
    if len(tensor.shape) < 2 or tensor.type_name == "F32":
        return tensor
    wanted = mix.usual
    if tensor.name == "output.weight" or (is_tied and tensor.name == "token_embd.weight"):
        wanted = mix.output
    elif tensor.name.endswith(_WORTH_MORE) and _is_worth_more(int(tensor.name.split(".")[1]), n_layers):
        wanted = mix.better
    found = by_name(wanted)
    while tensor.shape[0] % found.block_elements:
        found = by_name(_FALLBACKS[found.name])
    size = tensor.n_elements // found.block_elements * found.block_bytes
    return tensor._replace(type_name=found.name, size_bytes=size)


def _is_worth_more(layer: int, n_layers: int) -> bool:
    """The first and the last eighth, and every third between them."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
