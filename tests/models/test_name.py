"""Which texts are names of models, and which kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest
from localrun.models.name import Kind, ModelName
from localrun.models.storage.manifest import ManifestKey


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
        "host:port/owner/name", "host:99999999/owner/name", "owner:1/name", "https://hf.co/owner/name/wiki/main",
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
        path = ManifestKey.of(text).path(Path("/models"))
    except BadRequest:
        return
    parts = path.relative_to("/models/manifests").parts
    assert len(parts) == 4
    assert not any(set(part) & set("/\\\0:") or part.startswith(".") for part in parts)
    assert str(path).isascii()


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/o/r/blob/main/Foo-Q8_0.gguf", "huggingface.co/o/r:Foo-Q8_0.gguf"),
        ("https://huggingface.co/o/r/resolve/main/sub/Foo.gguf?download=true", "huggingface.co/o/r:Foo.gguf"),
        ("https://hf.co/o/r/blob/v1.0/My%20Model%20(v2)%20Q4_K_M.gguf", "hf.co/o/r@v1.0:My_Model__v2__Q4_K_M.gguf"),
        ("huggingface.co/o/r/tree/main", "huggingface.co/o/r"),
        ("https://www.huggingface.co/o/r/tree/main/Q4_K_M", "www.huggingface.co/o/r:Q4_K_M"),
        ("https://huggingface.co/o/r/?library=gguf", "huggingface.co/o/r"),
        ("o/r:My Model (v2) Q4_K_M.gguf", "o/r:My_Model__v2__Q4_K_M.gguf"),
        ("o/r:모델-Q8_0.gguf", "o/r:__-Q8_0.gguf"),
    ],
)
def test_an_address_from_a_browser_and_a_file_with_blanks_are_names(address: str, name: str) -> None:
    parsed = ModelName.parse(address)
    assert parsed == ModelName.parse(name)
    assert parsed.is_hub


@pytest.mark.parametrize(
    "text", ["a/b:x/../y z.gguf", "a/b:c\\d e.gguf", "/my models/a b.gguf", "C:/my models/a b.gguf"]
)
def test_a_path_with_blanks_is_none(text: str) -> None:
    if ".." in text:
        with pytest.raises(BadRequest):
            ModelName.parse(text)
    else:
        assert ModelName.parse(text).kind is Kind.PATH
