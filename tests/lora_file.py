"""Adapters of random numbers for a synthesized model: strong enough to change what it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import read_header

RANK = 4


def write_lora(
    model: Path, out: Path, *, architecture: str | None = None, seed: int = 0, strength: float = 1.0
) -> Path:
    """An adapter for the queries of every layer of `model`, or for what a recurrent one reads. At full strength
    rounding decides what is said; a two-thousandth is still a lot."""
    header = read_header(model)
    writer = gguf.GGUFWriter(out, architecture or header.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK * 64))
    rng = np.random.default_rng(seed)
    skipped = f"blk.{_n_layers(header)}."  # what drafts
    for tensor in header.tensors:
        if not tensor.name.startswith(skipped) and tensor.name.endswith(("attn_q.weight", "ssm_in.weight")):
            n_in, n_out = tensor.shape
            writer.add_tensor(tensor.name + ".lora_a", rng.standard_normal((RANK, n_in)).astype(np.float32))
            writer.add_tensor(
                tensor.name + ".lora_b", (strength * rng.standard_normal((n_out, RANK))).astype(np.float32)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def write_vector(
    model: Path,
    out: Path,
    *,
    seed: int = 0,
    strength: float = 1.0,
    hint: str = "",
    width: int = 0,
    layers: Sequence[int] | None = None,
) -> Path:
    """A control vector with a direction for every layer of `model` but the first. With `hint`, `width` or `layers` it
    is for another."""
    header = read_header(model)
    writer = gguf.GGUFWriter(out, "controlvector")
    writer.add_string("controlvector.model_hint", hint or header.architecture)
    rng = np.random.default_rng(seed)
    for layer in range(1, _n_layers(header)) if layers is None else layers:
        direction = strength * rng.standard_normal(width or header.n_embd)
        writer.add_tensor(f"direction.{layer}", direction.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _n_layers(header: Header) -> int:
    n_drafting = header.metadata.get(f"{header.architecture}.nextn_predict_layers", 0)
    assert isinstance(n_drafting, int)
    return header.n_layers - n_drafting
