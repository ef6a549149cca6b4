"""Which texts are names of models, and which kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest
from localrun.models.name import Kind, ModelName
from localrun.models.storage.manifest import Key


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
        ("https://huggingface.co/owner/model", "huggingface.co/owner/model", None),
        ("owner/model:model-Q4_0.gguf", "owner/model", "model-Q4_0.gguf"),
        ("hf.co/owner/model@v1.0:Q4_0", "hf.co/owner/model@v1.0", "Q4_0"),
        ("127.0.0.1:5000/library/model:tag", "127.0.0.1:5000/library/model", "tag"),
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
        "/tmp/NUL.gguf", "/" + "d/" * 2048 + "m.gguf", "\udcff.gguf", "http://host/owner/name", "model@v1", "dot.",
        "owner/dot.:tag", "host/owner/name@v1", "owner/name@", "owner/na@me@v1", "own@er/name", "owner/name@../x",
        "host:port/owner/name", "host:99999999/owner/name", "owner:1/name", "https://hf.co/owner/name/tree/main",
        "owner/con@main", "name:tag.", "оwner/name", "owner/name:Ｑ4_0", "owner/name\u200b",
    ],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ModelName.parse(text)
    assert caught.value.field == "model"
    assert caught.value.message.startswith("the model name ")
    assert len(caught.value.message) < 500
    caught.value.message.encode()


@pytest.mark.parametrize(
    ("text", "is_hub", "registry_host", "repo", "revision"),
    [
        ("owner/name:Q8_0", True, "", "owner/name", ""),
        ("hf.co/Owner/Name@abc:Q8_0", True, "", "Owner/Name", "abc"),
        ("HUGGINGFACE.co/owner/name", True, "", "owner/name", ""),
        ("registry.ollama.ai/somebody/name:tag", False, "registry.ollama.ai", "somebody/name", ""),
        ("Registry.ollama.ai/library/_name:tag", False, "", "_name", ""),
        ("library/name", False, "", "name", ""),
        ("https://hf.co/library/name", True, "", "library/name", ""),
        ("Localhost:5000/owner/name", False, "localhost:5000", "owner/name", ""),
        ("name:tag", False, "", "name", ""),
    ],
)
def test_where_a_name_points(text: str, is_hub: bool, registry_host: str, repo: str, revision: str):
    name = ModelName.parse(text)
    assert (name.is_hub, name.registry_host, name.repo, name.revision) == (is_hub, registry_host, repo, revision)


PIECES = [
    "..",
    ".",
    "/",
    "\\",
    ":",
    "@",
    "a",
    "b.c",
    "hf.co",
    "con",
    "%2e",
    "~",
    "-",
    "+",
    "\0",
    "\n",
    " ",
    ".gguf",
    "é",
    "://",
]


@given(st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_no_name_leads_out_of_the_models_folder(text: str) -> None:
    try:
        path = Key.of(text).path(Path("/models"))
    except BadRequest:
        return
    parts = path.relative_to("/models/manifests").parts
    assert len(parts) == 4
    assert not any(set(part) & set("/\\\0:") or part.startswith(".") for part in parts)
    assert str(path).isascii()
