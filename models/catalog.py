"""The catalogue: short names of well-known models, and the hub repositories that they stand for.

`catalog.toml` is read once, and checked when it is read. A name is `family:size`, with or without a quantization at the
end (`qwen3:0.6b-q8_0`); the bare family, also with `latest`, is the family's first entry.

Does not: say what fits a machine (quant_choice.py), or whether a repository still exists.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec

from localrun.models import quant_choice
from localrun.models.name import DEFAULT_TAG, Kind, ModelName


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `quants` maps a quantization to its approximate size in GB (1e9 bytes); `context_tokens` is what the
    model was trained for; `memory_gb` is what a machine should have for the smallest quantization listed."""

    name: str
    repo: str
    quants: dict[str, float]
    context_tokens: int
    licence: str
    memory_gb: float
    use: str

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]


class CatalogMatch(NamedTuple):
    """An entry that a name stands for, and the quantization that the name asks for (None: whatever fits)."""

    entry: Entry
    quant: str | None


@cache
def _tagged() -> tuple[tuple[Entry, tuple[str, ...]], ...]:
    """Every entry, with all tags that mean it. What a model does not say is its family's."""
    found = []
    for family in tomllib.loads((resources.files(__package__) / "catalog.toml").read_text(encoding="utf-8"))["family"]:
        for model in family.pop("models"):
            tags = (model.pop("tag"), *model.pop("also", ()))
            said = {**family, **model, "name": f"{family['name']}:{tags[0]}"}
            found.append((msgspec.convert(said, Entry), tags))
    return tuple(found)


@cache
def entries() -> tuple[Entry, ...]:
    """The catalogue, in its own order."""
    return tuple(entry for entry, _ in _tagged())


def find(name: ModelName) -> CatalogMatch | None:
    """What a bare name stands for; None for other names and for bare names that the catalogue does not have."""
    if name.kind is not Kind.STORED or "/" in name.name:
        return None
    family, tag = name.name.lower(), (name.tag or DEFAULT_TAG).lower()
    of_family = [(entry, tags) for entry, tags in _tagged() if entry.family == family]
    if of_family and tag == DEFAULT_TAG:
        return CatalogMatch(of_family[0][0], None)
    for entry, tags in of_family:
        for known in tags:
            if tag == known:
                return CatalogMatch(entry, None)
            # Other endings, such as `-instruct` or `-it-qat`, are other models: registries have them under these tags.
            before, ending, quant = tag.partition(known + "-")
            if ending and not before and quant_choice.is_quant(quant):
                return CatalogMatch(entry, quant.upper())
    return None


def search(query: str) -> list[Entry]:
    """The entries with every word of the query somewhere in their name, repository or use; all for an empty query."""
    words = query.lower().split()
    return [entry for entry in entries() if all(word in _text(entry) for word in words)]


def _text(entry: Entry) -> str:
    also = "images pictures photos" if "vision" in entry.use else ""
    return f"{entry.name} {entry.repo} {entry.use} {also}".lower()
