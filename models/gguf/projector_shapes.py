"""The shapes and types of a projector's tensors, as the graphs of libmtmd take them: ggml ends the process where a
product or a sum does not work out, or where an operation does not know a type.

Pure. One line of a table says it of each type of projector. There are lines for those that models are published with;
of the others (`KINDS` lacks them) a file that does not fit together ends the engine that opens it.

A line is made of items like `mm.1+:E*F,H`: a tensor and its dimensions in GGML's order.

    name      its weight;  name+  with its bias;  name~  with its bias if it is there;  =name  a tensor of that name
    ?item     may be missing;  !item  must be
    E         numbers from the file (`Sizes`, below) and products of them; N+1 is one more, >1500 that many or more
    H         any other letter: whatever the first tensor says, the same in all; `square` is any square number
    item!     numbers that are added, F32. Without the mark vectors are F32, matrices of any type that has products,
              and what has more dimensions F16 or BF16 as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

from localrun.models.gguf.header import TensorInfo

# E embedding_length, Q and K the widths of queries and keys, D a head's, S a patch's side, N patches of a picture, C
# with one for all of it where there is, F patches or frames that make a row, L layers whose outputs make one, M the
# spectrum's bands, W projection_dim.
Sizes = Mapping[str, int]

_SCALES = "?ls1:E ?ls2:E ?out_scale:E ?attn_post_norm:E ?ffn_post_norm:E "
_NORMS = _SCALES + "?ln1~:E ?ln2~:E attn_out~:Q,E "
_FFN = "ffn_up~:E,U ffn_down~:U,E ?ffn_gate~:E,U"
# Early converters exchanged the names. libmtmd sees it by the shape.
_EXCHANGED_FFN = "ffn_up~:U,E ffn_down~:E,U ?ffn_gate~:E,U"
_SPLIT = _NORMS + "attn_q~:E,Q attn_k~:E,K attn_v~:E,K "
_FUSED = _NORMS + "attn_qkv~:E,3*Q "
_LLAVA = _NORMS + "attn_q~:E,Q attn_k~:E,Q attn_v~:E,Q "
_QWEN_2 = _NORMS + "attn_q+:E,Q attn_k+:E,Q attn_v+:E,Q "
_QWEN_3 = _NORMS + "attn_qkv+:E,3*E "
_WHISPER = _SCALES + "ln1+:E ln2+:E attn_q+:E,Q attn_k:E,K !=attn_k.bias attn_v+:E,K attn_out~:Q,E !=attn_qkv.weight "

_EDGES = "?{p}.pre_ln~:E ?{p}.post_ln~:E "
_PATCHES = "v.patch_embd:S,S,3,E ?=v.patch_embd.bias:E "
_TWO_PATCHES = "v.patch_embd:S,S,3,E =v.patch_embd.weight.1:S,S,3,E !=v.class_embd "
_LLAVA_PATCHES = _PATCHES + "?=v.class_embd:E v.position_embd:E,>C "
# What is between the patches and the model is there if patches are merged.
_MISTRAL = "!=v.class_embd ?mm.input_norm:E ?mm.patch_merger:E*F,Z mm.1~:Z,H mm.2~:H,P ?=v.token_embd.img_break:P"
_WAVES = "a.conv1d.1:3,M,E =a.conv1d.1.bias:1,E! a.conv1d.2:3,E,E =a.conv1d.2.bias:1,E! a.position_embd:E,>1500! "


class _Kind(NamedTuple):
    layer: str
    others: str


def _pictures(layer: str, others: str) -> _Kind:
    return _Kind(layer, _EDGES.format(p="v") + others)


def _sound(others: str) -> _Kind:
    return _Kind(_WHISPER, _EDGES.format(p="a") + _WAVES + others)


KINDS: Final[Mapping[str, _Kind]] = {
    "gemma3": _pictures(_SPLIT, _PATCHES + "v.position_embd:E,N! mm.soft_emb_norm:E mm.input_projection:P,E"),
    "idefics3": _pictures(_SPLIT, _PATCHES + "v.position_embd:E,N! mm.model.fc:E*F,P"),
    "internvl": _pictures(_SPLIT, _PATCHES + "=v.class_embd:E v.position_embd:E,N+1! mm.model.mlp.0+:E*F "
                          "mm.model.mlp.1+:E*F,H mm.model.mlp.3+:H,P"),
    "janus_pro": _pictures(_SPLIT, _PATCHES + "v.position_embd:E,N! mm.0+:E,H mm.1+:H,P"),
    "lfm2": _pictures(_SPLIT, _PATCHES + "v.position_embd:E,square! ?mm.input_norm~:E*F mm.1+:E*F,H mm.2+:H,P"),
    "lightonocr": _pictures(_SPLIT, _PATCHES + _MISTRAL),
    "mlp": _pictures(_LLAVA, _LLAVA_PATCHES + "mm.0+:E*L,H mm.2+:H,P"),
    "mlp_norm": _pictures(_LLAVA, _LLAVA_PATCHES + "mm.0+:E*L,H mm.1+:H mm.3+:H,P mm.4+:P"),
    "phi4": _pictures(_SPLIT, _PATCHES + "v.position_embd:E,square! mm.0+:E,H mm.2+:H,P"),
    "pixtral": _pictures(_SPLIT, _PATCHES + _MISTRAL),
    "qwen2vl_merger": _pictures(_QWEN_2, _TWO_PATCHES + "!=v.patch_embd.bias mm.0+:4*E,H mm.2+:H,P"),
    "qwen2.5vl_merger": _pictures(_QWEN_2, _TWO_PATCHES + "!=v.patch_embd.bias mm.0+:4*E,H mm.2+:H,W"),
    "qwen3vl_merger": _pictures(_QWEN_3, _TWO_PATCHES + "=v.patch_embd.bias:E v.position_embd:E,square! "
                                "mm.0+:4*E,H mm.2+:H,P"),
    "glma": _sound("mm.a.norm_pre+:E mm.a.mlp.1+:E*F,H mm.a.mlp.2+:H,P =v.boi:P =v.eoi:P"),
    "meralion": _sound("mm.a.norm_pre+:E*F mm.a.mlp.0+:E*F,H mm.a.mlp.1+:H,G mm.a.mlp.2+:H,G mm.a.mlp.3+:G,P"),
    "musicflamingo": _sound("mm.a.mlp.1+:E,H mm.a.mlp.2+:H,P"),
    "qwen2a": _sound("mm.a.fc+:E,P"),
    "ultravox": _sound("mm.a.norm_pre:E*F mm.a.mlp.1:E*F,2*H mm.a.norm_mid:H mm.a.mlp.2:H,P"),
    "voxtral": _sound("mm.a.mlp.1:E*F,H mm.a.mlp.2:H,P"),
}  # fmt: skip
_EXCHANGED = frozenset({"gemma3", "idefics3", "mlp", "qwen2vl_merger", "qwen2.5vl_merger"})
# Deepstack: rows of some layers have outputs of their own.
_DEEP = "qwen3vl_merger"
_DEEP_PART = "norm~:4*E fc1~:4*E,H fc2~:H,P"

_NUMBERS = frozenset({"F32"})
_HALVES = frozenset({"F32", "F16", "BF16"})
_NO_PRODUCTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
_ITEM = re.compile(r"([?!]?)(=?)([\w.]+?)([+~]?)(?::([\w*,+>]+?))?(!?)")


class _TensorRule(NamedTuple):
    """A tensor, as a table says it. `is_there` is None if it may be missing."""

    name: str
    dimensions: tuple[str, ...]
    is_there: bool | None
    mark: str


def problem(name: str, prefix: str, n_layers: int, sizes: Sizes, tensors: Mapping[str, TensorInfo]) -> str:
    """What does not fit in a projector of the type `name` (one of `KINDS`), as the end of a sentence that begins with
    the file; "" if all does. `prefix` is that of its layers' tensors."""
    kind = KINDS["mlp_norm" if name == "mlp" and "mm.3.weight" in tensors else name]
    known = {**sizes, "C": sizes.get("N", 0) + ("v.class_embd" in tensors)}
    if kind.others.endswith(_MISTRAL):
        needed = {"mm.patch_merger.weight", "mm.input_norm.weight"}
        if missing := needed - set(tensors) if sizes["F"] > 1 or "mm.patch_merger.weight" in tensors else set():
            return f"lacks the tensor '{min(missing)}', with which patches are merged"
        if "mm.patch_merger.weight" not in tensors:
            known["Z"] = sizes["E"]
    if found := _unfit(kind.others, "", known, tensors):
        return found
    for layer in range(n_layers):
        block = f"{prefix}.blk.{layer}."
        items = _FUSED if kind.layer is _SPLIT and f"{block}attn_qkv.weight" in tensors else kind.layer
        down = tensors.get(f"{block}ffn_down.weight")
        is_exchanged = name in _EXCHANGED and down is not None and down.shape[0] == sizes["E"]
        items += _EXCHANGED_FFN if is_exchanged else _FFN
        if found := _unfit(items, block, dict(sizes), tensors):
            return found
        if found := _unfit_norms(block, sizes, tensors):
            return found
        is_deep = name == _DEEP and f"v.deepstack.{layer}.fc1.weight" in tensors
        if is_deep and (found := _unfit(_DEEP_PART, f"v.deepstack.{layer}.", {**sizes, "P": known["P"]}, tensors)):
            return found
    return ""


def _unfit_norms(block: str, sizes: Sizes, tensors: Mapping[str, TensorInfo]) -> str:
    """Queries and keys are scaled whole or by head; where they are one tensor, by head only."""
    is_fused = f"{block}attn_qkv.weight" in tensors
    for part, width in (("q", "Q"), ("k", "K")):
        found = tensors.get(f"{block}attn_{part}_norm.weight")
        is_whole = found is not None and not is_fused and found.shape == (sizes[width],)
        if found is not None and not is_whole and (bad := _unfit_one(found, ("D",), "", dict(sizes))):
            return bad
    return ""


def _unfit(items: str, block: str, known: dict[str, int], tensors: Mapping[str, TensorInfo]) -> str:
    """What does not fit among the items; `known` learns the letters."""
    for wanted in _parsed(items):
        name = block + wanted.name
        found = tensors.get(name)
        if found is None:
            if wanted.is_there:
                return f"lacks the tensor '{name}'"
        elif wanted.is_there is False:
            return f"has the tensor '{name}', where a projector of its type has none"
        elif bad := _unfit_one(found, wanted.dimensions, wanted.mark, known):
            return bad
    return ""


def _unfit_one(tensor: TensorInfo, dimensions: tuple[str, ...], mark: str, known: dict[str, int]) -> str:
    n_all = max(len(dimensions), len(tensor.shape))
    shape = tensor.shape + (1,) * (n_all - len(tensor.shape))
    needed = dimensions + ("1",) * (n_all - len(dimensions))
    said = []
    is_right = True
    for size, text in zip(shape, needed, strict=True):
        is_right &= _fits(size, text, known)
        said.append(_shown(text, known))
    if not is_right:
        wanted = ", ".join(said[: max(1, len(dimensions))])
        return f"has the tensor '{tensor.name}' of the shape {tensor.shape}, where ({wanted}) is needed"
    types = _NUMBERS if mark else (_NUMBERS, None, _HALVES)[min(len(dimensions), 3) - 1]
    if tensor.type_name in _NO_PRODUCTS or (types is not None and tensor.type_name not in types):
        usable = " or ".join(sorted(types, reverse=True)) if types is not None else "F32, F16, BF16 or quantized"
        return f"has the tensor '{tensor.name}' of the type {tensor.type_name}, where {usable} is needed"
    return ""


def _fits(size: int, text: str, known: dict[str, int]) -> bool:
    if text.startswith(">"):
        return size >= _product(text[1:], known)[1]
    if text == "square":
        return math.isqrt(size) ** 2 == size
    unknown, product = _product(text, known)
    if not unknown:
        return size == product
    if product == 0 or size % product:
        return False
    known[unknown] = size // product
    return True


def _shown(text: str, known: Mapping[str, int]) -> str:
    if text.startswith(">"):
        return f"{_product(text[1:], known)[1]} or more"
    if text == "square":
        return "a square number"
    unknown, product = _product(text, known)
    return str(product) if not unknown else f"a multiple of {product}"


def _product(text: str, known: Mapping[str, int]) -> tuple[str, int]:
    """The letter that nothing is known of, and the product of the rest."""
    factors, _, more = text.partition("+")
    unknown, product = "", 1
    for factor in factors.split("*"):
        if factor.isdigit() or factor in known:
            product *= int(factor) if factor.isdigit() else known[factor]
        else:
            unknown = factor
    return unknown, product + int(more or 0)


@cache
def _parsed(items: str) -> tuple[_TensorRule, ...]:
    return tuple(_each(items))


def _each(items: str) -> Iterator[_TensorRule]:
    for item in items.split():
        found = _ITEM.fullmatch(item)
        assert found is not None, item
        presence, is_whole_name, name, bias, sizes, mark = found.groups()
        is_there = {"?": None, "!": False, "": True}[presence]
        dimensions = tuple(sizes.split(",")) if sizes else ()
        yield _TensorRule(name if is_whole_name else f"{name}.weight", dimensions, is_there, mark)
        if bias:
            yield _TensorRule(f"{name}.bias", dimensions[-1:], is_there if bias == "+" else None, "!")
