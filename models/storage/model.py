"""A model as the store knows it, with a manifest or without: its files, what they say, and whether its name still
means it.

Does not: find models (store.py).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from localrun.config import LoadSettings
from localrun.errors import BadModelFile, ModelNotFound
from localrun.file_stamp import FileStamp
from localrun.models.fallback_template import fallback_template, name_of
from localrun.models.gguf import projectors
from localrun.models.gguf.header import Header
from localrun.models.load_settings import too_long
from localrun.models.modelfile import load_settings
from localrun.models.storage.manifest import Manifest, Message, Role, Source, StoredFile, in_full


class Origin(StrEnum):
    """How the store came to a model. `foreign` files lie in a folder that somebody else keeps, `path` ones anywhere;
    of a `cluster`'s only the cards are here (`Store.cards`)."""

    BUILT_IN = "built-in"
    PATH = "path"
    FOLDER = "folder"
    FOREIGN = "foreign"
    MANIFEST = "manifest"
    CLUSTER = "cluster"


class OwnAdapter(NamedTuple):
    """An adapter that a model is opened with, and its strength."""

    file: StoredFile
    path: Path
    scale: float = 1.0


class Part(NamedTuple):
    """A file that an engine opens besides the model's own, and the strength of an adapter."""

    path: Path
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Model:
    """A sound model. `name` is canonical: whatever way the model was asked for, this is what it is called.

    `path` is the file to load, of a model in several shards the first; `size_bytes` counts all of its files. `adapters`
    are those of its manifest, or else those of its table in the settings file (`adapters.opened`). `program` is the one
    that keeps a foreign model, "" where that is not known. `projector` is the file that makes rows of images or audio
    for it; without one `no_projector` says why, as a clause, where there is anything to say.
    """

    name: str
    path: Path
    size_bytes: int
    modified_at: datetime
    header: Header
    origin: Origin = Origin.PATH
    manifest: Manifest | None = None
    adapters: tuple[OwnAdapter, ...] = ()
    program: str = ""
    projector: Path | None = None
    projector_header: Header | None = None
    no_projector: str = ""

    @cached_property
    def digest(self) -> str:
        """64 hex digits that tell this model from another.

        An id, not a content hash: sha256 over what a manifest says, so that copies have one id, and over the stamps of
        all files if their contents are not known by it. Raises BadModelFile when one is gone.
        """
        digest = hashlib.sha256()
        if self.manifest is None or not all(file.digest for file in self.manifest.files):
            try:
                digest.update(str([tuple(FileStamp.of(path)) for path in self.files]).encode())
            except OSError as error:
                raise BadModelFile(f"{error.filename} cannot be read: {error.strerror or error}") from error
        if self.manifest is None:
            return digest.hexdigest()
        # Who brought a file says nothing about what is in it.
        files = [msgspec.structs.replace(file, adopted=False) for file in self.manifest.files]
        digest.update(msgspec.json.encode(files, order="sorted"))
        for field in ("parameters", "system", "template", "messages", "licence_text"):
            digest.update(msgspec.json.encode(getattr(self.manifest, field), order="sorted"))
        digest.update(self.draft.encode())
        return digest.hexdigest()

    def check_here(self) -> None:
        """Raises ModelNotFound for a model whose weights are on other machines."""
        if self.origin is Origin.CLUSTER:
            raise ModelNotFound(
                self.name,
                "the cluster runs it, and its files are on other machines; pull it here, or copy them",
            )

    @property
    def full_name(self) -> str:
        """As lists have it."""
        return in_full(self.name, self.source)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What an engine opens besides the model's first file: its other shards, adapters, and the projector."""
        adapters = [Part(adapter.path, adapter.scale) for adapter in self.adapters]
        others = (*self.header.shard_paths[1:], *([] if self.projector is None else [self.projector]))
        return (*adapters, *map(Part, others))

    @property
    def files(self) -> tuple[Path, ...]:
        """All that an engine opens: what its answers depend on."""
        return (self.path, *(part.path for part in self.parts))

    @property
    def media(self) -> tuple[str, ...]:
        """Of "vision" and "audio", what it takes besides text."""
        return () if self.projector_header is None else projectors.encoders(self.projector_header.metadata)

    @property
    def adapter_bytes(self) -> int:
        """Size of its adapters' files."""
        return sum(adapter.file.size_bytes for adapter in self.adapters)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Ollama's option names with the values that requests to this model have by default."""
        return self.manifest.parameters if self.manifest else {}

    @property
    def draft(self) -> str:
        """Name or path of the smaller model that drafts for it; "" for none."""
        return self.manifest.draft if self.manifest else ""

    @property
    def speculates(self) -> bool | None:
        """Whether its requests draft that do not say so themselves; None leaves it to the daemon."""
        value = self.parameters.get("speculation")
        return value if isinstance(value, bool) else None

    @cached_property
    def load(self) -> LoadSettings:
        """How its own parameters want it to be loaded; with adapters of its own, without others. Raises BadModelFile
        naming a parameter that is out of range."""
        has_adapters = self.manifest is not None and self.manifest.of_role(Role.ADAPTER)
        try:
            said = load_settings(self.parameters)
            return msgspec.structs.replace(said, adapters=()) if has_adapters else said
        except ValueError as error:
            raise BadModelFile(f"a parameter of model '{self.name}' is out of range: {error}", field="model") from None

    @property
    def system(self) -> str:
        """The system prompt of conversations that bring none."""
        return self.manifest.system if self.manifest else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """What every conversation begins with."""
        return self.manifest.messages if self.manifest else ()

    @cached_property
    def template(self) -> str:
        """The Jinja template of the chat, the manifest's or the file's; "" when neither has one."""
        return (self.manifest.template if self.manifest else "") or self.header.chat_template or ""

    @cached_property
    def guessed_template(self) -> str:
        """The one of its family, for a model that has none. Raises BadModelFile for a file that has gone."""
        return fallback_template(self.header.architecture, self.header.control_tokens())

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What is done otherwise than somebody may expect: with a chat template that is a guess, and with a context
        beyond the limit. Raises BadModelFile."""
        template = ""
        if self.header.generates and not self.template:
            template = (
                f"the model has no chat template, and that of {name_of(self.guessed_template)} is used: a guess by its "
                f"vocabulary and architecture (TEMPLATE in a Modelfile sets another)"
            )
        return tuple(filter(None, (template, too_long(self.header, self.load))))

    @property
    def tool_template(self) -> str:
        """The one for chats with tools; "" where that is `template` as well."""
        return "" if self.manifest and self.manifest.template else self.header.tool_template or ""

    @property
    def source(self) -> Source:
        """Where it came from. A file that was not pulled came from itself."""
        if self.manifest:
            return self.manifest.source
        return Source(kind=self.origin.value, repo=self.program, file=str(self.path))


class Evidence(NamedTuple):
    """What tells that a name may have come to mean something else: what `paths` were like when it was looked up."""

    paths: Sequence[Path]
    stamps: tuple[FileStamp | None, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Evidence:
        return cls(paths, tuple(map(FileStamp.found, paths)))

    def holds(self) -> bool:
        """Whether all is as it was: a few looks at the disk, cheap enough for an event loop."""
        return all(map(operator.eq, map(FileStamp.found, self.paths), self.stamps))

    def joined(self, other: Evidence) -> Evidence:
        """Holds while both do."""
        return Evidence((*self.paths, *other.paths), (*self.stamps, *other.stamps))
