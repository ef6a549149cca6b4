"""The catalogue: what is in it, and what names stand for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from localrun.models import catalog, quant_choice
from localrun.models.fit import USABLE_RAM
from localrun.models.name import Kind, ModelName


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_every_entry_is_sound(entry: catalog.Entry):
    name = ModelName.parse(entry.name)
    assert (name.kind, name.name) == (Kind.STORED, entry.family)
    assert entry.name == f"{entry.family}:{name.tag}"
    assert entry.name == entry.name.lower()
    assert ModelName.parse(entry.repo).is_hub
    assert set(entry.quants) <= set(quant_choice.QUALITY)
    sizes = list(entry.quants.values())
    assert sizes == sorted(sizes)
    assert 0.01 < sizes[0] < entry.memory_gb
    assert entry.context_tokens >= 512
    assert entry.licence
    assert entry.use


def test_no_key_of_the_file_is_passed_over():
    known = {*catalog.Entry.__struct_fields__} - {"name"}
    for family in tomllib.loads((Path(catalog.__file__).parent / "catalog.toml").read_text(encoding="utf-8"))["family"]:
        assert family.keys() - known == {"name", "models"}
        assert {key for model in family["models"] for key in model} <= known | {"tag", "also"}


def test_models_that_see_are_found():
    for word in ("vision", "images", "photos"):
        found = {entry.name for entry in catalog.search(word)}
        assert {"gemma3:4b", "qwen3.5:4b"} <= found
        assert not found & {"gemma3:1b", "gemma3:270m", "qwen3:8b"}


def test_no_name_and_no_repository_twice():
    assert len({entry.name for entry in catalog.entries()}) == len(catalog.entries()) >= 20
    assert len({entry.repo for entry in catalog.entries()}) == len(catalog.entries())


@pytest.mark.parametrize("memory_gb", [8, 16, 24, 32, 48, 64, 96, 128])
def test_there_is_something_for_every_usual_machine(memory_gb: int):
    chats = [entry for entry in catalog.entries() if "chat" in entry.use and entry.memory_gb <= memory_gb]
    assert max(entry.memory_gb for entry in chats) > memory_gb / 2
    # What it says of memory is what the rule for quantizations comes to.
    for entry in chats:
        assert next(iter(entry.quants.values())) * 1e9 <= memory_gb * 1e9 * USABLE_RAM


@pytest.mark.parametrize(
    "name",
    [
        *("gemma3:270m", "gemma3:12b", "gemma3:27b", "gemma4:26b", "gemma4:31b", "qwen3:32b", "qwen3.5:27b"),
        *("qwen3.5:35b-a3b", "qwen3-coder:30b", "gpt-oss:120b", "llama3.3:70b", "phi4:14b", "ministral-3"),
        *("devstral-small-2", "glm-4.7-flash", "deepseek-r1:14b", "deepseek-r1:32b", "embeddinggemma"),
        *("mxbai-embed-large", "qwen3-embedding:4b", "qwen3-embedding:8b", "qwen3-reranker"),
    ],
)
def test_well_known_names_are_there(name: str):
    assert catalog.find(ModelName.parse(name)) is not None


@pytest.mark.parametrize(
    ("text", "name", "quant"),
    [
        ("qwen3:0.6b", "qwen3:0.6b", None),
        ("Qwen3:0.6B", "qwen3:0.6b", None),
        ("qwen3", "qwen3:8b", None),
        ("qwen3:latest", "qwen3:8b", None),
        ("qwen3:0.6b-q8_0", "qwen3:0.6b", "Q8_0"),
        ("qwen3:4b-q4_K_M", "qwen3:4b", "Q4_K_M"),
        ("qwen3:4b-UD-Q4_K_XL", "qwen3:4b", "UD-Q4_K_XL"),
        ("granite4", "granite4:micro", None),
        ("llama3.2", "llama3.2:3b", None),
        ("gemma3", "gemma3:4b", None),
        ("gemma3:12b", "gemma3:12b", None),
        ("qwen2.5-coder", "qwen2.5-coder:7b", None),
        ("deepseek-r1", "deepseek-r1:8b", None),
        ("qwen3.5", "qwen3.5:9b", None),
        ("smollm2", "smollm2:1.7b", None),
        ("gpt-oss", "gpt-oss:20b", None),
        ("qwen3:30b-a3b", "qwen3:30b", None),
        ("gemma4:26b-a4b-q8_0", "gemma4:26b", "Q8_0"),
        ("all-minilm:l6-v2", "all-minilm:22m", None),
        ("nomic-embed-text", "nomic-embed-text:v1.5", None),
    ],
)
def test_what_a_name_stands_for(text: str, name: str, quant: str | None):
    found = catalog.find(ModelName.parse(text))
    assert found is not None
    assert (found.entry.name, found.quant) == (name, quant)


@pytest.mark.parametrize(
    "text",
    [
        *("tiny", "qwen3:99b", "qwen33", "owner/qwen3", "host/library/qwen3", "./qwen3.gguf"),
        # Tags of Ollama's registry that begin like an entry, and are other models.
        *("qwen3:4b-instruct", "qwen3:4b-instruct-2507-q4_K_M", "gemma3:4b-it-qat", "gemma3:4b-it-q4_K_M"),
        "qwen3:q8_0",
    ],
)
def test_what_is_not_in_the_catalogue(text: str):
    assert catalog.find(ModelName.parse(text)) is None


def test_search():
    assert catalog.search("") == list(catalog.entries())
    assert [entry.name for entry in catalog.search("EMBED many")] == [
        *("embeddinggemma:300m", "bge-m3:567m", "qwen3-embedding:8b", "qwen3-embedding:0.6b", "qwen3-embedding:4b"),
    ]
    assert catalog.search("nothing of the kind") == []
