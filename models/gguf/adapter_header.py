"""What an adapter's header says, whether it fits a model, and whether its numbers are numbers: LoRA files and control
vectors.

Two headers are compared; no weights are read but by `check_finite`. What is refused here is what llama.cpp would
refuse, or what would end the engine's process, or would be added to the wrong place without a word: another
architecture, tensors that the model does not have or has in other sizes, half pairs, vectors of another width.

Does not: tell apart models of the same shape. An adapter that was trained for another model of the same family and size
fits, and talks nonsense.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from localrun.errors import BadModelFile
from localrun.models.gguf import tables
from localrun.models.gguf.bounded_reader import open_model_file
from localrun.models.gguf.header import FileKind, Header, TensorInfo, once_for_each_pair

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_A, _B = ".lora_a", ".lora_b"
# llama.cpp passes over them.
_PASSED_OVER = "_norm.weight"
# A row of this table is looked up, so its adapter has its halves the other way round.
_LOOKED_UP, _OUTPUT = "token_embd.weight", "output.weight"
# What converters write, and every backend multiplies with: with others ggml ends the process.
_MULTIPLIED = frozenset({"F32", "F16", "BF16", "Q8_0"})
_DIRECTION = re.compile(r"direction\.([0-9]{1,9})")


class AdapterFacts(NamedTuple):
    """`architecture` is that of its models, "" where a control vector does not say. `rank` and `alpha` are a LoRA's;
    `base` is the name of the model that it was made for, "" where the file does not say. `n_layers` is how many layers
    it changes at least one tensor of."""

    kind: FileKind
    architecture: str
    rank: int
    alpha: float
    base: str
    n_layers: int


def facts_of(header: Header) -> AdapterFacts:
    """Raises BadModelFile for a file that is no adapter that an engine here can load."""
    if header.kind == FileKind.CONTROL_VECTOR:
        hint = header.text("controlvector.model_hint")
        return AdapterFacts(FileKind.CONTROL_VECTOR, hint, 0, 0.0, _base(header), len(_directions(header)))
    name = header.path.name
    if header.metadata.get("adapter.type") != "lora":
        raise BadModelFile(f"{name} is an adapter of a kind that llama.cpp does not run; only LoRA is")
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise BadModelFile(
            f"{name} is an activated LoRA (aLoRA), which takes effect from certain tokens on; only LoRA that is in "
            f"effect from the beginning is supported"
        )
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise BadModelFile(f"{name} has the LoRA scale (alpha) {alpha!r}, which is no number")
    pairs = _pairs(header)
    rank = max(b.shape[0] for _, b in pairs.values())
    layers = {match[1] for base in pairs if (match := re.match(r"blk\.(\d+)\.", base))}
    return AdapterFacts(FileKind.ADAPTER, header.architecture, rank, alpha, _base(header), len(layers))


@once_for_each_pair
def misfit(adapter: Header, model: Header) -> str:
    """Why the adapter cannot be used with the model, as the end of a sentence that begins with the adapter; "" if it
    can. Raises BadModelFile as `facts_of` does."""
    facts = facts_of(adapter)
    if facts.architecture and facts.architecture != model.architecture:
        return f"is for {facts.architecture[:60]}, and the model is {model.architecture}"
    return (
        _misfit_of_vector(adapter, model) if facts.kind is FileKind.CONTROL_VECTOR else _misfit_of_lora(adapter, model)
    )


def _misfit_of_lora(adapter: Header, model: Header) -> str:
    tensors = {tensor.name: tensor for tensor in model.tensors}
    for name, (a, b) in _pairs(adapter).items():
        base = tensors.get(name)
        if base is None:
            return f"changes '{name}', which the model does not have"
        if base.type_name == "NVFP4":
            return f"changes '{name}', which this model has in NVFP4; llama.cpp cannot do that"
        if name == _LOOKED_UP and _OUTPUT not in tensors:
            # llama.cpp takes the halves as they are for both uses, and ends the process.
            return f"changes '{name}', which this model computes its output with as well; llama.cpp cannot do that"
        shape, a_shape, b_shape = (_padded(tensor.shape) for tensor in (base, a, b))
        n_in, n_out = (b_shape[1], a_shape[1]) if name.endswith(_LOOKED_UP) else (a_shape[0], b_shape[1])
        if (n_in, n_out) != shape[:2] or a_shape[2:] != shape[2:] or b_shape[2:] != shape[2:]:
            there = "x".join(map(str, base.shape))
            return f"changes '{name}' as one of {n_in}x{n_out}, but the model's is {there}"
    return ""


def _misfit_of_vector(adapter: Header, model: Header) -> str:
    # Those that predict further tokens come last, and are no part of it.
    n_layers = model.n_layers - model.count("nextn_predict_layers")
    for layer, tensor in _directions(adapter).items():
        if tensor.shape[0] != model.n_embd:
            return f"has vectors of {tensor.shape[0]} numbers, and the model's states have {model.n_embd}"
        if layer >= n_layers:
            return f"has a vector for layer {layer}, and the model's last is {n_layers - 1}"
    return ""


def _pairs(header: Header) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """The two halves of each tensor's change, by the tensor's name."""
    halves: dict[str, dict[str, TensorInfo]] = {}
    for tensor in header.tensors:
        name, suffix = tensor.name[: -len(_A)], tensor.name[-len(_A) :]
        if suffix in (_A, _B):
            if tensor.type_name not in _MULTIPLIED:
                types = ", ".join(sorted(_MULTIPLIED))
                raise BadModelFile(
                    f"{header.path.name} has '{tensor.name}' in {tensor.type_name}; adapters are in {types}"
                )
            halves.setdefault(name, {})[suffix] = tensor
        elif not tensor.name.endswith(_PASSED_OVER):
            raise BadModelFile(f"{header.path.name} has the tensor '{tensor.name}', which is no part of a LoRA")
    pairs = {}
    for name, both in halves.items():
        if len(both) < 2:
            raise BadModelFile(f"{header.path.name} has only half of the change of '{name}'")
        a, b = both[_A], both[_B]
        rank = a.shape[0] if name.endswith(_LOOKED_UP) else _padded(a.shape)[1]
        if rank != b.shape[0]:
            raise BadModelFile(f"{header.path.name} has a change of '{name}' whose two halves do not fit each other")
        pairs[name] = (a, b)
    if not pairs:
        raise BadModelFile(f"{header.path.name} is a LoRA that changes nothing")
    return pairs


def _directions(header: Header) -> dict[int, TensorInfo]:
    """The vectors by their layers."""
    directions = {}
    for tensor in header.tensors:
        match = _DIRECTION.fullmatch(tensor.name)
        layer = int(match[1]) if match else 0
        if not layer or layer in directions:
            raise BadModelFile(
                f"{header.path.name} has the tensor '{tensor.name}'; a control vector has direction.1, direction.2, ..."
            )
        if len(tensor.shape) != 1 or tensor.type_name != "F32":
            raise BadModelFile(f"{header.path.name} has a '{tensor.name}' that is no vector of 32-bit floats")
        directions[layer] = tensor
    if not directions:
        raise BadModelFile(f"{header.path.name} is a control vector without vectors")
    return directions


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In four dimensions: files leave trailing dimensions of 1 out, or not."""
    return (*shape, *(1,) * (4 - len(shape)))


def _base(header: Header) -> str:
    """By the converter's entry, else the name that is given for such files."""
    return (header.text("general.base_model.0.name") or header.text("general.base_model.0.repo_url"))[:200]


# Whole tensors are read, a piece at a time, so memory is bounded.
_PIECE_BYTES = 4 << 20
# How a number, or a block's scale, is stored, and the bits that are all set in one that is none: of
# all types that an adapter may have. llama.cpp passes over tensors of others.
_FLOATS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "Q8_0": ("<u2", 0x7C00)}


def check_finite(header: Header) -> None:
    """Raises BadModelFile with the name of a tensor that has NaN or infinite numbers, and when the file cannot be
    read."""
    with open_model_file(header.path, limit_bytes=header.size_bytes) as reader:
        for tensor in header.tensors:
            if tensor.type_name not in _FLOATS:
                continue
            block_bytes = tables.BY_NAME[tensor.type_name].block_bytes
            piece_bytes = _PIECE_BYTES // block_bytes * block_bytes
            reader.seek(tensor.offset, f"'{tensor.name}'")
            for begin in range(0, tensor.size_bytes, piece_bytes):
                piece = reader.take(min(piece_bytes, tensor.size_bytes - begin), f"'{tensor.name}'")
                if not _is_finite(piece, tensor.type_name, block_bytes):
                    raise BadModelFile(
                        f"{header.path.name} has NaN or infinite numbers in '{tensor.name}'; it is "
                        f"damaged, or its training failed. Get another copy, or convert it again"
                    )


def _is_finite(piece: bytes, type_name: str, block_bytes: int) -> bool:
    import numpy as np  # late: most of the daemon's life goes by without it

    stored, mask = _FLOATS[type_name]
    numbers: NDArray[np.unsignedinteger]
    if type_name == "Q8_0":
        scales = np.frombuffer(piece, np.uint8).reshape(-1, block_bytes)[:, :2]
        numbers = np.ascontiguousarray(scales).view(stored)
    else:
        numbers = np.frombuffer(piece, stored)
    return not bool(((numbers & mask) == mask).any())
