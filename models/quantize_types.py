"""The quantizations that `create --quantize` makes, by the names that people use.

Pure. Only those that llama.cpp makes well without a calibration text; numbers are those of `llama_ftype`.
"""

from __future__ import annotations

import contextlib

from localrun.errors import BadRequest
from localrun.models.ggml_types import FILE_TYPES, by_name
from localrun.models.header import Header

_NAMES = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16"),
)
_NUMBERS = {name: number for number, name in FILE_TYPES.items() if name in _NAMES}
_ALIASES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "Q3_K": "Q3_K_M", "FP16": "F16"}
_SOURCES = ("F32", "F16", "BF16")


def file_type(name: str) -> int:
    """The number of a quantization. Raises BadRequest naming them all."""
    wanted = name.upper()
    wanted = _ALIASES.get(wanted, wanted)
    if wanted not in _NUMBERS:
        raise BadRequest(f"quantize: '{name[:40]}' is not one of {', '.join(_NAMES)}", field="quantize")
    return _NUMBERS[wanted]


def canonical(name: str) -> str:
    """The name as llama.cpp writes it. Raises BadRequest."""
    return FILE_TYPES[file_type(name)]


def check_source(header: Header, name: str) -> None:
    """Raises BadRequest for a model that was quantized already."""
    if header.quantization not in _SOURCES:
        raise BadRequest(
            f"quantize: '{name}' is {header.quantization} already, and quantizing twice loses much more than once; "
            f"begin with an F16, BF16 or F32 file of it",
            field="quantize",
        )


def expected_bytes(header: Header, name: str) -> int:
    """About what the quantized file takes, rather too much: some tensors keep more bits than the rest."""
    kind = canonical(name)
    for type_name in (kind, kind.rpartition("_")[0]):
        with contextlib.suppress(KeyError):
            chosen = by_name(type_name)
            size_bytes = header.n_params * chosen.block_bytes // chosen.block_elements
            return min(header.size_bytes, size_bytes * 5 // 4 + header.data_offset)
    return header.size_bytes
