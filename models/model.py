"""A model of the store: a sound GGUF file, and what a manifest adds to it.

Pure but for `digest`, which reads headers. Does not: find models (store.py), or hold weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from localrun.errors import BadModelFile
from localrun.models.header import Header
from localrun.models.manifest import Manifest, Message, Role, Source

_CHUNK_BYTES = 1024 * 1024


class Origin(StrEnum):
    """How the store came to a model. `foreign` files lie in a folder that somebody else keeps, `path` ones anywhere."""

    BUILT_IN = "built-in"
    PATH = "path"
    FOLDER = "folder"
    FOREIGN = "foreign"
    MANIFEST = "manifest"


@dataclass(frozen=True, eq=False)
class Model:
    """A sound model. `name` is canonical: whatever way the model was asked for, this is what it is called.

    `path` is the file to load, of a model in several shards the first; `size_bytes` counts all of its files.
    """

    name: str
    path: Path
    size_bytes: int
    modified_at: datetime
    header: Header
    origin: Origin = Origin.PATH
    manifest: Manifest | None = None
    adapters: tuple[Path, ...] = ()

    @cached_property
    def digest(self) -> str:
        """64 hex digits that tell this model from another.

        An id, not a content hash. Of a file: sha256 over its size, modification time and header, which costs the
        header's bytes (some megabytes) and not the weights' gigabytes. With a manifest: sha256 over what it says, so
        that copies have one id. Raises BadModelFile when the file is gone.
        """
        if self.manifest is None:
            return _file_digest(self)
        digest = hashlib.sha256()
        if not all(file.digest for file in self.manifest.files):
            digest.update(_file_digest(self).encode())
        # Who brought a file says nothing about what is in it.
        files = [msgspec.structs.replace(file, adopted=False) for file in self.manifest.files]
        digest.update(msgspec.json.encode(files, order="sorted"))
        for field in ("parameters", "system", "template", "messages", "licence_text"):
            digest.update(msgspec.json.encode(getattr(self.manifest, field), order="sorted"))
        return digest.hexdigest()

    @property
    def adapter_bytes(self) -> int:
        """Size of its adapters' files."""
        files = self.manifest.files if self.manifest else ()
        return sum(file.size_bytes for file in files if file.role is Role.ADAPTER)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Ollama's option names with the values that requests to this model have by default."""
        return self.manifest.parameters if self.manifest else {}

    @property
    def system(self) -> str:
        """The system prompt of conversations that bring none."""
        return self.manifest.system if self.manifest else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """What every conversation begins with."""
        return self.manifest.messages if self.manifest else ()

    @property
    def template(self) -> str:
        """The Jinja template of the chat, the manifest's or the file's; "" when neither has one."""
        return (self.manifest.template if self.manifest else "") or self.header.chat_template or ""

    @property
    def source(self) -> Source:
        """Where it came from. A file that was not pulled came from itself."""
        if self.manifest:
            return self.manifest.source
        return Source(kind=self.origin.value, file=str(self.path))


class DamagedFile(NamedTuple):
    """A file or a manifest that cannot be used, and why."""

    path: Path
    problem: str


# A header lives as long as the store remembers its file.
_digests: WeakKeyDictionary[Header, str] = WeakKeyDictionary()


def _file_digest(model: Model) -> str:
    known = _digests.get(model.header)
    if known is None:
        known = _digests[model.header] = _read_digest(model)
    return known


def _read_digest(model: Model) -> str:
    left = model.header.data_offset
    try:
        with model.path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode())
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise BadModelFile(f"{model.path.name} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
