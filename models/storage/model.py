"""A model or an adapter as the store knows it, with a manifest or without: its files, what they say, how it is talked
to, and whether its name still means it; and what `localrun plan` found out about it on this machine.

Does not: find models (store.py), or read weights, but for the SHA-256 of an adapter of which nobody has said it.
"""

from __future__ import annotations

import hashlib
import operator
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from localrun import config, stored
from localrun.config import LoadSettings
from localrun.errors import BadModelFile, ModelNotFound
from localrun.models.fit import too_long
from localrun.models.gguf import projectors
from localrun.models.gguf.adapter_header import AdapterFacts, facts_of, misfit
from localrun.models.gguf.header import Header
from localrun.models.modelfile import load_settings
from localrun.models.storage.blobs import hash_file
from localrun.models.storage.manifest import Manifest, Message, Place, Role, Source, StoredFile, in_full
from localrun.stored import FileStamp


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
class Found:
    """What a name stands for, sound. `name` is canonical: whatever way it was asked for, this is what it is called.
    `program` is the one that keeps a foreign file, "" where that is not known."""

    name: str
    path: Path
    size_bytes: int
    modified_at: datetime
    header: Header
    origin: Origin = Origin.PATH
    manifest: Manifest | None = None
    program: str = ""

    @property
    def source(self) -> Source:
        """Where it came from. A file that was not pulled came from itself."""
        if self.manifest:
            return self.manifest.source
        return Source(kind=self.origin.value, repo=self.program, file=str(self.path))


@dataclass(frozen=True, eq=False)
class Model(Found):
    """`path` is the file to load, of a model in several shards the first; `size_bytes` counts all of its files.
    `adapters` are those of its manifest, or else those of its table in the settings file (`adapters.opened`).
    `projector` is the file that makes rows of images or audio for it; without one `no_projector` says why, as a clause,
    where there is anything to say."""

    adapters: tuple[OwnAdapter, ...] = ()
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
                self.name, "the cluster runs it, and its files are on other machines; pull it here, or copy them"
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
        """Ollama's option names with the values that requests to this model have by default: those that it was given
        here or by its registry, and below them those that its file recommends."""
        return {**self.header.sampling, **(self.manifest.parameters if self.manifest else {})}

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


FORECASTS = "forecasts"


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """So many chats at once, each with so many tokens per second; `made_at` is when that was found out."""

    chats: int
    tokens_per_s: float
    made_at: str


def keep_forecast(digest: str, forecast: Forecast) -> None:
    """Of the model with this digest. Raises OSError."""
    stored.write(_forecast_path(digest), forecast)


def kept_forecast(digest: str) -> Forecast | None:
    return stored.read(_forecast_path(digest), _forecast_decoder)


def _forecast_path(digest: str) -> Path:
    return config.folders().data / FORECASTS / f"{digest.removeprefix('sha256:')}.json"


_forecast_decoder = msgspec.json.Decoder(Forecast)


class NamedAdapter(Found):
    """An adapter that has a name of its own: a LoRA file or a control vector that was pulled, created, or lies in a
    folder."""

    @cached_property
    def facts(self) -> AdapterFacts:
        return facts_of(self.header)

    @property
    def file(self) -> StoredFile:
        """As the manifest of a model names it."""
        if self.manifest:
            return self.manifest.main
        return StoredFile(role=Role.ADAPTER, place=Place.FILE, size_bytes=self.size_bytes, path=str(self.path))

    @property
    def sha256(self) -> str:
        """64 hex digits of the file's content. Raises BadModelFile when the file is gone."""
        return self.file.sha256 or sha256_of(self.path, self.header)

    def misfit(self, model: Header) -> str:
        """Why it cannot be used with a model, as the end of a sentence; "" if it can."""
        return misfit(self.header, model)


# A header lives as long as the store remembers its file.
_known: WeakKeyDictionary[Header, str] = WeakKeyDictionary()


def sha256_of(path: Path, header: Header) -> str:
    """64 hex digits of a file's content, read once for each `header`. Raises BadModelFile."""
    known = _known.get(header)
    if known is None:
        try:
            known = _known[header] = hash_file(path).removeprefix("sha256:")
        except OSError as error:
            raise BadModelFile(f"{path.name} cannot be read: {error.strerror or error}") from error
    return known


# --- chat templates for model files that bring none ---
# What the vocabulary has tells the format better than the architecture does: a Llama fine-tuned with `<|im_start|>`
# writes ChatML. So control tokens are asked first, then the architecture, and ChatML is the last resort, since most
# models have seen it.

_LAST_RESORT = "ChatML"


class _Template(NamedTuple):
    name: str
    tokens: list[str]
    architectures: list[str]
    jinja: str


@cache
def _templates() -> list[_Template]:
    content = resources.files("localrun.models").joinpath("fallback_templates.toml").read_text(encoding="utf-8")
    return [_Template(**entry) for entry in tomllib.loads(content)["template"]]


def by_marks(text: str | Collection[str]) -> str:
    """The template whose marks are among these tokens, or in this text; "" for none."""
    return next((each.jinja for each in _templates() if each.tokens and all(mark in text for mark in each.tokens)), "")


def fallback_template(architecture: str, control_tokens: Sequence[str] = ()) -> str:
    """The template for a model file that brings none."""
    if template := by_marks(frozenset(control_tokens)):
        return template
    for each in _templates():
        if architecture.startswith(tuple(each.architectures)):
            return each.jinja
    return next(each.jinja for each in _templates() if each.name == _LAST_RESORT)


def name_of(template: str) -> str:
    """What people call one of these templates."""
    return next(each.name for each in _templates() if each.jinja == template)
