"""Numbers that are none, in every type that an adapter may have, wherever they are in a tensor."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from localrun.errors import BadModelFile
from localrun.models.gguf import adapter_header
from localrun.models.gguf.adapter_header import check_finite
from localrun.models.gguf.header import FileKind
from localrun.models.gguf.reader import read_header

TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}
N_IN, N_RANK, N_OUT = 256, 4, 96


def write(out: Path, type_name: str, at: int | None, value: float) -> Path:
    """A LoRA of two tensors; the second one has the value at this place, Q8_0 in the scale of its block."""
    kind = TYPES[type_name]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    rng = np.random.default_rng(1)
    for name, shape in (("a", (N_RANK, N_IN)), ("b", (N_OUT * 8, 32 * N_RANK))):
        numbers = rng.standard_normal(shape).astype(np.float32)
        data = gguf.quants.quantize(numbers, kind)
        if name == "b" and at is not None:
            if type_name == "Q8_0":
                blocks = data.reshape(-1, 34)
                blocks[at // 32, :2] = np.array([value], np.float16).view(np.uint8)
            else:
                flat = numbers.ravel()
                flat[at] = value
                data = gguf.quants.quantize(numbers, kind)
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{name}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", TYPES)
def test_it_is_found_and_named(type_name: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapter_header, "_PIECE_BYTES", 1000)  # several pieces, the last one not whole
    check_finite(read_header(write(tmp_path / "fine.gguf", type_name, None, 0), kind=FileKind.ADAPTER))
    for at in (0, 5000, N_OUT * 8 * 32 * N_RANK - 1):
        header = read_header(write(tmp_path / "bad.gguf", type_name, at, value), kind=FileKind.ADAPTER)
        with pytest.raises(
            BadModelFile, match=r"bad\.gguf has NaN or infinite numbers in 'blk\.0\.attn_q\.weight\.lora_b'"
        ):
            check_finite(header)


def test_a_file_that_became_shorter_is_said_to_be_so(tmp_path: Path):
    path = write(tmp_path / "x.gguf", "F32", None, 0)
    header = read_header(path, kind=FileKind.ADAPTER)
    with path.open("r+b") as file:
        file.truncate(header.size_bytes - 100)
    with pytest.raises(BadModelFile, match=r"x\.gguf (is truncated|became shorter)"):
        check_finite(header)
