"""What a source says about a model: the files that make it, and what goes with them.

Pure data. Everything in it came from another machine: file names and digests were checked before a path was made of
them, texts were not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from localrun.models.download.item import Item
from localrun.models.storage.manifest import Message, Source, StoredFile


@dataclass(frozen=True)
class PlannedFile:
    """`item` says how to get the file, `stored` how the manifest will name it (role, digest, place, path)."""

    item: Item
    stored: StoredFile


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """`files` are in the order of the manifest: the model (all shards), then adapters.

    `reason` is why these files were chosen, "" where the name left no choice. `licence` is a short name as the source
    gives it (`apache-2.0`), `licence_text` the whole text. `is_gated`: the owner of the repository asks for terms to be
    accepted first. `revision` is the commit, or the digest of a registry's manifest.
    """

    repo: str
    revision: str
    files: tuple[PlannedFile, ...]
    source: Source
    quant: str = ""
    reason: str = ""
    licence: str = ""
    licence_text: str = ""
    is_gated: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(file.item for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Of all files; those whose size is not known yet count as nothing."""
        return sum(file.item.size_bytes or 0 for file in self.files)
