"""LoRA files with tensors that `tests/lora_file.py` does not write, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np


def write_pair(
    out: Path,
    tensors: Mapping[str, tuple[int, ...]],
    *,
    architecture: str = "llama",
    kind: str = "lora",
    more: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    dtype: type[np.generic] = np.float32,
) -> Path:
    """Tensors of zeros in these shapes, as GGML orders dimensions."""
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    more(writer)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(tuple(reversed(shape)), dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
