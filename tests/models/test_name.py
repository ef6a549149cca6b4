"""Which texts are names of models, and which kind."""

from __future__ import annotations

import pytest

from localrun.errors import BadRequest
from localrun.models.name import Kind, ModelName


@pytest.mark.parametrize("text", ["tiny", "tiny:latest", "localrun/tiny", "localrun/tiny:latest", "TINY:Latest"])
def test_the_built_in_model(text: str) -> None:
    parsed = ModelName.parse(text)
    assert (parsed.kind, parsed.name, parsed.tag, parsed.text) == (Kind.BUILT_IN, "tiny", None, text)


@pytest.mark.parametrize(
    ("text", "name", "tag"),
    [
        ("smollm2-135m", "smollm2-135m", None),
        ("Qwen2.5_7B:q4_K_M", "Qwen2.5_7B", "q4_K_M"),
        ("tiny:q8_0", "tiny", "q8_0"),
        ("owner/model", "owner/model", None),
        ("hf.co/owner/model:Q4_0", "hf.co/owner/model", "Q4_0"),
        ("console", "console", None),
    ],
)
def test_stored_names(text: str, name: str, tag: str | None) -> None:
    parsed = ModelName.parse(text)
    assert (parsed.kind, parsed.name, parsed.tag) == (Kind.STORED, name, tag)


@pytest.mark.parametrize(
    "text",
    ["model.gguf", "./model.gguf", "/home/me/My Models/größe.GGUF", "sub/model.gguf", r"C:\models\m.gguf", "a..b.gguf"],
)
def test_paths(text: str) -> None:
    assert ModelName.parse(text) == ModelName(Kind.PATH, text)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "a b", "../x", "..", ".", "./x", "/etc/passwd", "x/../y", "a/b/c/d", "a//b", "/a", "a/", "name:",
        ":tag", "name:a:b", "name:tag/x", "name:..", "na..me", "%2e%2e", "%2e%2e/x", "-rf", ".hidden", "~/x", "a\\b",
        "a\0b", "a\nb", "a\x7fb", "tinу", "ｔｉｎｙ", "n" * 129, "n:" + "t" * 129, "n" * 5000, "CON", "nul", "aux.txt",
        "owner/com1", "name:lpt9", "../model.gguf", "a/../model.gguf", "..\\model.gguf", "a\0.gguf", "con.gguf",
        "/tmp/NUL.gguf", "/" + "d/" * 2048 + "m.gguf", "\udcff.gguf",
    ],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ModelName.parse(text)
    assert caught.value.field == "model"
    assert caught.value.message.startswith("the model name ")
    assert len(caught.value.message) < 500
    caught.value.message.encode()
