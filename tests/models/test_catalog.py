"""The catalogue: what is in it, and what names stand for."""

from __future__ import annotations

import pytest

from localrun.models import catalog, quant_choice
from localrun.models.name import Kind, ModelName


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_every_entry_is_sound(entry: catalog.Entry):
    name = ModelName.parse(entry.name)
    assert (name.kind, name.name, name.tag) == (Kind.STORED, entry.family, entry.tag)
    assert entry.tag
    assert entry.name == entry.name.lower()
    assert ModelName.parse(entry.repo).is_hub
    assert set(entry.quants) <= set(quant_choice.QUALITY)
    sizes = list(entry.quants.values())
    assert sizes == sorted(sizes)
    assert 0.01 < sizes[0] < entry.memory_gb
    assert entry.context_tokens >= 512
    assert entry.licence
    assert entry.use


def test_no_name_and_no_repository_twice():
    assert len({entry.name for entry in catalog.entries()}) == len(catalog.entries()) >= 20
    assert len({entry.repo for entry in catalog.entries()}) == len(catalog.entries())


@pytest.mark.parametrize(
    ("text", "name", "quant"),
    [
        ("qwen3:0.6b", "qwen3:0.6b", None),
        ("Qwen3:0.6B", "qwen3:0.6b", None),
        ("qwen3", "qwen3:4b", None),
        ("qwen3:latest", "qwen3:4b", None),
        ("qwen3:0.6b-q8_0", "qwen3:0.6b", "Q8_0"),
        ("qwen3:4b-q4_K_M", "qwen3:4b", "Q4_K_M"),
        ("qwen3:4b-UD-Q4_K_XL", "qwen3:4b", "UD-Q4_K_XL"),
        ("granite4", "granite4:micro-h", None),
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
        *("tiny", "qwen3:99b", "qwen33", "library/qwen3", "host/library/qwen3", "./qwen3.gguf"),
        # Tags of Ollama's registry that begin like an entry, and are other models.
        *("qwen3:4b-instruct", "qwen3:4b-instruct-2507-q4_K_M", "gemma3:4b-it-qat", "gemma3:4b-it-q4_K_M"),
        "qwen3:q8_0",
    ],
)
def test_what_is_not_in_the_catalogue(text: str):
    assert catalog.find(ModelName.parse(text)) is None


def test_search():
    assert catalog.search("") == list(catalog.entries())
    assert [entry.name for entry in catalog.search("EMBED many")] == ["bge-m3:567m", "qwen3-embedding:0.6b"]
    assert catalog.search("nothing of the kind") == []
