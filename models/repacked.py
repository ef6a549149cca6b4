"""Which weights llama.cpp copies into another order at load, for the CPU's vector instructions.

Pure. The copy is private memory. The mapped original is not read again: it stays in the page cache, and counts as
resident, until the system wants the pages back. The types are those of `ggml_repack_get_optimal_repack_type` in
ggml-cpu/repack.cpp, for processors of the last ten years: AVX2, or Arm's dot product.

Does not: ask the processor. One without these instructions copies nothing, and the estimate is too high.
"""

from __future__ import annotations

import platform

from localrun.models.header import Header, TensorInfo

_X86_TYPES = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
_ARM_TYPES = _X86_TYPES | {"Q5_K", "Q6_K", "Q8_0", "Q1_0"}
_TYPES = {"x86_64": _X86_TYPES, "amd64": _X86_TYPES, "arm64": _ARM_TYPES, "aarch64": _ARM_TYPES}
# Rows are interleaved by eight.
_ROWS = 8


def repacked_bytes(header: Header, machine: str = platform.machine()) -> int:
    """Bytes of copied tensors whose originals stay mapped, on a `machine` as `platform` names it; 0 for an unknown one.

    What lies behind the last tensor that is not copied is unmapped (`unmap_fragment` in llama-mmap.cpp).
    """
    types = _TYPES.get(machine.lower(), frozenset())
    mapped_bytes = passed_bytes = 0
    for tensor in header.tensors:
        if _is_copied(tensor, types):
            passed_bytes += tensor.size_bytes
        else:
            mapped_bytes = passed_bytes
    return mapped_bytes


def _is_copied(tensor: TensorInfo, types: frozenset[str]) -> bool:
    """Embeddings are looked up by row and stay as they are."""
    is_matrix = len(tensor.shape) > 1 and tensor.shape[1] % _ROWS == 0
    return tensor.type_name in types and is_matrix and not tensor.name.startswith("token_embd")
