"""What to fetch, within which limits, and who is told how far it is; and what a source says about a whole model.

Pure data. An item is one file under its final name; how its bytes arrive (parts, retries, what a former attempt left)
is no matter of whoever asks for it. What came from another machine: file names and digests were checked before a path
was made of them, texts were not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from localrun.models.storage.manifest import Message, Source, StoredFile

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Item:
    """One file. `headers` (an Authorization, say) go to the origin of `url` and never to another.

    `target` is the final path, which appears when every byte is there and its digest is right. `sha256` is 64
    lower-case hex digits of the content; `git_sha1` 40 of git's blob id, for small files of repositories that have
    nothing better. `size_bytes` None: the server is asked. `lock_path` is the file that keeps other processes out; by
    default it lies beside the target and is removed afterwards. `name` is what messages call the file.
    """

    url: str
    target: Path
    name: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    size_bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    lock_path: Path | None = None


@dataclass(frozen=True, kw_only=True)
class FetchLimits:
    """`connections` are shared by all items of one `fetch`; `rate_bytes_per_s` too, None is as fast as it goes.

    A part is what one request asks for. A request that ends early is sent again for what is missing; `retries` counts
    failures in a row of one part, and a failure after `progress_bytes` or more of new data starts the count anew.
    Parts are asked for in their order, or in any, so that those who fetch the same can give each other what they have.
    `record_bytes` is the most that a killed process has to transfer again per connection; `sync_bytes` the most that a
    power cut may cost. `reserve_bytes` of the disk stay free.
    """

    connections: int = 8
    rate_bytes_per_s: int | None = None
    part_bytes: int = 64 * MIB
    record_bytes: int = MIB
    sync_bytes: int = 64 * MIB
    progress_bytes: int = 64 * 1024
    retries: int = 6
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 30.0
    longest_wait_s: float = 300.0
    stall_s: float = 30.0
    reserve_bytes: int = 256 * MIB
    is_in_order: bool = True


class Progress(Protocol):
    """Called in the event loop of `fetch`; must be quick."""

    def advanced(self, item: Item, n_bytes_done: int) -> None:
        """`n_bytes_done` of the item are on disk, former attempts included. It never decreases for an item."""

    def verifying(self, item: Item) -> None:
        """Every byte of the item is there; its digest is being computed."""


class NoProgress:
    """For those who do not want to know."""

    def advanced(self, item: Item, n_bytes_done: int) -> None: ...
    def verifying(self, item: Item) -> None: ...


@dataclass(frozen=True)
class PlannedFile:
    """`item` says how to get the file, `stored` how the manifest will name it (role, digest, place, path)."""

    item: Item
    stored: StoredFile


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """`files` are in the order of the manifest: the model (all shards), then its projector, then adapters.

    `reason` is why these files were chosen, "" where the name left no choice. `licence` is a short name as the source
    gives it (`apache-2.0`), `licence_text` the whole text. `revision` is the commit, or the digest of a registry's
    manifest. `left_projector` is the name of the projector of this model that was not wanted.
    """

    repo: str
    revision: str
    files: tuple[PlannedFile, ...]
    source: Source
    quant: str = ""
    reason: str = ""
    licence: str = ""
    licence_text: str = ""
    left_projector: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(file.item for file in self.files)
