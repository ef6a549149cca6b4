"""A LoRA adapter of random numbers for a synthesized model: strong enough to change what it says."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from localrun.models.gguf.reader import read_header

RANK = 4


def write_lora(model: Path, out: Path, *, architecture: str | None = None, seed: int = 0) -> Path:
    """An adapter for the queries of every layer of `model`."""
    header = read_header(model)
    writer = gguf.GGUFWriter(out, architecture or header.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK * 64))
    rng = np.random.default_rng(seed)
    for tensor in header.tensors:
        if tensor.name.endswith("attn_q.weight"):
            n_in, n_out = tensor.shape
            writer.add_tensor(tensor.name + ".lora_a", rng.standard_normal((RANK, n_in)).astype(np.float32))
            writer.add_tensor(tensor.name + ".lora_b", rng.standard_normal((n_out, RANK)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
