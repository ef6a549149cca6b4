"""Texts of single tokens, read from the file again."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.errors import BadModelFile
from localrun.models import header
from localrun.models.gguf import read_header
from localrun.models.header import ArraySummary, read_token, special_token_text


def test_tokens_by_id(tiny_gguf: Path) -> None:
    header = read_header(tiny_gguf)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArraySummary)
    assert [read_token(tiny_gguf, tokens, index) for index in (0, 2, 3, 258, 259)] == [
        "<|endoftext|>", "<|im_end|>", "Ā", "ÿ", "Ġt",
    ]  # fmt: skip
    assert read_token(tiny_gguf, tokens, tokens.length - 1).startswith("Ġ")


def test_special_tokens_by_role(tiny_gguf: Path) -> None:
    header = read_header(tiny_gguf)
    assert special_token_text(header, "tokenizer.ggml.eos_token_id") == "<|im_end|>"
    assert special_token_text(header, "tokenizer.ggml.bos_token_id") == "<|endoftext|>"
    assert special_token_text(header, "tokenizer.ggml.unknown_token_id") == ""
    header.metadata["tokenizer.ggml.unknown_token_id"] = 1 << 40
    assert special_token_text(header, "tokenizer.ggml.unknown_token_id") == ""


def test_control_tokens_in_id_order(tiny_gguf: Path) -> None:
    assert read_header(tiny_gguf).control_tokens() == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("limit", ["MAX_CONTROL_TOKENS", "MAX_TOKEN_BYTES"])
def test_beyond_a_limit(limit: str, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, limit, 2)
    with pytest.raises(BadModelFile, match="the limit is 2"):
        read_header(tiny_gguf).control_tokens()
