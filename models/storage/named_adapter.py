"""An adapter that has a name of its own: a LoRA file or a control vector that was pulled, created, or lies in a folder.

Made by the store. Does not: read weights, but for the SHA-256 of a file of which nobody has said it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

from localrun.errors import BadModelFile
from localrun.models.gguf.adapter_header import AdapterFacts, facts_of, misfit
from localrun.models.gguf.header import Header
from localrun.models.storage.blobs import hash_file
from localrun.models.storage.manifest import Manifest, Place, Role, Source, StoredFile


@dataclass(frozen=True, eq=False)
class NamedAdapter:
    """A sound adapter. `name` is canonical; `origin` is one of the store's, and `program` keeps a foreign file."""

    name: str
    path: Path
    size_bytes: int
    modified_at: datetime
    header: Header
    origin: str
    manifest: Manifest | None = None
    program: str = ""

    @cached_property
    def facts(self) -> AdapterFacts:
        return facts_of(self.header)

    @property
    def source(self) -> Source:
        """Where it came from. A file that was not pulled came from itself."""
        if self.manifest:
            return self.manifest.source
        return Source(kind=self.origin, repo=self.program, file=str(self.path))

    @property
    def file(self) -> StoredFile:
        """As the manifest of a model names it."""
        if self.manifest:
            return self.manifest.main
        return StoredFile(role=Role.ADAPTER, place=Place.FILE, size_bytes=self.size_bytes, path=str(self.path))

    @property
    def sha256(self) -> str:
        """64 hex digits of the file's content. Raises BadModelFile when the file is gone."""
        return content_sha256(self.file, self.path, self.header)

    def misfit(self, model: Header) -> str:
        """Why it cannot be used with a model, as the end of a sentence; "" if it can. Remembered, for lists ask it of
        every pair."""
        known = _misfits.setdefault(self.header, WeakKeyDictionary())
        if model not in known:
            known[model] = misfit(self.header, model)
        return known[model]


# A header lives as long as the store remembers its file.
_known: WeakKeyDictionary[Header, str] = WeakKeyDictionary()
_misfits: WeakKeyDictionary[Header, WeakKeyDictionary[Header, str]] = WeakKeyDictionary()


def content_sha256(file: StoredFile, path: Path, header: Header) -> str:
    """64 hex digits of a file's content: what was verified when it came, else read now, once for each `header`. Raises
    BadModelFile."""
    if file.digest and file.place is not Place.FILE:
        return file.digest.removeprefix("sha256:")
    known = _known.get(header)
    if known is None:
        try:
            known = _known[header] = hash_file(path).removeprefix("sha256:")
        except OSError as error:
            raise BadModelFile(f"{path.name} cannot be read: {error.strerror or error}") from error
    return known
