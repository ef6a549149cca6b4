"""Prompts to fill in the middle, for the ways in which files name the tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from localrun.errors import BadRequest
from localrun.models.gguf.header import Header
from localrun.server.prompting import segments as module
from localrun.server.prompting.segments import FimTokens, fim_tokens, infill
from localrun.wire import Segment


class FakeHeader(SimpleNamespace):
    __hash__ = object.__hash__

    def control_tokens(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self.controls)


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "special_token_text", lambda header, key: header.texts.get(key, ""))


def header(*controls: str, **texts: str) -> Header:
    made: Any = FakeHeader(controls=controls, texts={f"tokenizer.ggml.{key}": text for key, text in texts.items()})
    return cast(Header, made)


QWEN = {
    "fim_pre_token_id": "<|fim_prefix|>",
    "fim_suf_token_id": "<|fim_suffix|>",
    "fim_mid_token_id": "<|fim_middle|>",
    "fim_rep_token_id": "<|repo_name|>",
    "fim_sep_token_id": "<|file_sep|>",
}


def test_the_tokens_that_the_file_names():
    assert infill(header(**QWEN), "def f(", "\n") == (
        Segment("<|fim_prefix|>"),
        Segment("def f(", trusted=False),
        Segment("<|fim_suffix|>"),
        Segment("\n", trusted=False),
        Segment("<|fim_middle|>"),
    )


def test_older_files_name_them_otherwise():
    old = header(prefix_token_id="▁<PRE>", suffix_token_id="▁<SUF>", middle_token_id="▁<MID>")
    assert fim_tokens(old) == FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>")


def test_files_that_name_none_are_known_by_their_control_tokens():
    assert fim_tokens(header("<fim_prefix>", "<fim_suffix>", "<fim_middle>")) is not None
    assert fim_tokens(header("<|prefix|>", "<|suffix|>", "<|middle|>")) is not None
    assert fim_tokens(header(*QWEN.values())) == fim_tokens(header(**QWEN))


def test_without_a_token_for_the_middle_the_suffix_comes_first():
    prompt = infill(header("[PREFIX]", "[SUFFIX]"), "a", "b")
    assert [segment.text for segment in prompt] == ["[SUFFIX]", "b", "[PREFIX]", "a"]


def test_other_files_come_before():
    prompt = infill(header(**QWEN), "a", "", extra_files=[("x.py", "pass")])
    assert "".join(segment.text for segment in prompt) == (
        "<|repo_name|>repository\n<|file_sep|>x.py\npass\n<|file_sep|><|fim_prefix|>a<|fim_suffix|><|fim_middle|>"
    )


def test_a_client_s_control_token_stays_text():
    prompt = infill(header(**QWEN), "<|fim_middle|>", "x")
    assert Segment("<|fim_middle|>", trusted=False) in prompt


def test_other_models_say_so():
    with pytest.raises(BadRequest, match="cannot fill in") as refused:
        infill(header("<s>"), "a", "b", field="suffix")
    assert refused.value.field == "suffix"
    with pytest.raises(BadRequest, match=r"^model: .*cannot fill in"):
        infill(header("<s>"), "a", "b", field="model")
