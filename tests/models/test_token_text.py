"""Texts of special tokens, read from the file's vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from localrun.errors import BadModelFile
from localrun.models.gguf import read_header
from localrun.models.header import special_token_text

EOS = "tokenizer.ggml.eos_token_id"
BOS = "tokenizer.ggml.bos_token_id"
WORDS = [f"word{number}" for number in range(2000)]


def write(path: Path, *, eos: int | None, tokens: list[str] = WORDS) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_token_list(tokens)
    if eos is not None:
        writer.add_uint32(EOS, eos)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("eos", [0, 1, 1234, 1999])
def test_the_text_of_a_token(tmp_path: Path, eos: int) -> None:
    assert special_token_text(read_header(write(tmp_path / "m.gguf", eos=eos)), EOS) == f"word{eos}"


@pytest.mark.parametrize("eos", [None, 2000, 2**31])
def test_no_such_token_is_no_text(tmp_path: Path, eos: int | None) -> None:
    header = read_header(write(tmp_path / "m.gguf", eos=eos))
    assert special_token_text(header, EOS) == ""
    assert special_token_text(header, BOS) == ""


def test_an_endless_text_is_refused(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m.gguf", eos=1, tokens=["a", "x" * 5000]))
    with pytest.raises(BadModelFile, match="5000 bytes"):
        special_token_text(header, EOS)


def test_a_file_that_is_gone_or_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", eos=1999)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(BadModelFile):
        special_token_text(header, EOS)
    path.unlink()
    with pytest.raises(BadModelFile):
        special_token_text(header, EOS)
