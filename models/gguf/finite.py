"""Whether all numbers of an adapter's tensors are numbers: no NaN, no infinity.

Reads whole tensors, a piece at a time, so memory is bounded. Knows the types that an adapter may have: floats, and
Q8_0, where the scales of its blocks are looked at. Tensors of other types are those that llama.cpp passes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.errors import BadModelFile
from localrun.models.gguf import ggml_types
from localrun.models.gguf.bounded_reader import open_model_file
from localrun.models.gguf.header import Header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PIECE_BYTES = 4 << 20
# How a number, or a block's scale, is stored, and the bits that are all set in one that is none.
_FLOATS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "Q8_0": ("<u2", 0x7C00)}


def check_finite(header: Header) -> None:
    """Raises BadModelFile with the name of a tensor that has other numbers, and when the file cannot be read."""
    with open_model_file(header.path, limit_bytes=header.size_bytes) as reader:
        for tensor in header.tensors:
            if tensor.type_name not in _FLOATS:
                continue
            block_bytes = ggml_types.by_name(tensor.type_name).block_bytes
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
