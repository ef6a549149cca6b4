"""Manifests: what a model's name stands for when it is more than one GGUF file in the models folder, and an adapter's.

A manifest lists the files of a model and what goes with them (parameters, system prompt, messages, template, licence,
where they came from). It is one JSON file, `manifests/<host>/<owner>/<name>/<tag>.json` below the models folder, and is
written last: a name points to files only when they are complete.

Everything read from the disk is checked again before a path is made of it: manifests are small text files that people
edit, and the texts in them came from other machines.

Does not: look at the files that a manifest names (store.py does), or lock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from localrun import stored
from localrun.errors import BadModelFile, BadRequest
from localrun.models import builtin
from localrun.models.name import BUILT_IN, DEFAULT_TAG, HUB_HOST, OLLAMA_HOST, Kind, ModelName
from localrun.stored import open_regular

FOLDER = "manifests"
# Raised when an older program could not do with what is written: it says so then, and leaves the manifest alone.
VERSION = 1
MAX_MANIFEST_BYTES = 8 * 1024 * 1024
MAX_FILES = 1_024
# Where a name without a host, or without an owner, lies.
LOCAL_HOST = "local"
LOCAL_OWNER = "library"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SUFFIX = ".json"


class Role(StrEnum):
    """What a file is for. Several files with role `model` are the shards of one model, in order."""

    MODEL = "model"
    PROJECTOR = "projector"
    ADAPTER = "adapter"
    LICENCE = "licence"


class Place(StrEnum):
    """Where a file lies, which also tells whose it is.

    `blob`: in `blobs/` of the models folder, by its digest; ours. `hub`: in the shared Hugging Face cache, `path` is
    relative to it. `file`: anywhere, `path` is absolute; it stays when the name goes. `built-in`: the built-in model's
    file, wherever this version of localrun is installed.
    """

    BLOB = "blob"
    HUB = "hub"
    FILE = "file"
    BUILT_IN = "built-in"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One file. `digest` is `sha256:` and 64 hex digits of the content, "" if it was never computed (place `file`).

    `adopted`: it was there before, fetched into the shared cache by another program; it stays when the name goes.
    """

    role: Role
    place: Place
    size_bytes: int
    digest: str = ""
    path: str = ""
    adopted: bool = False

    @property
    def sha256(self) -> str:
        """64 hex digits of the content as it was verified when it came; "" for a file that somebody else may change."""
        return "" if self.place is Place.FILE else self.digest.removeprefix("sha256:")


class Message(msgspec.Struct, frozen=True):
    """A message that every conversation with the model begins with."""

    role: str
    content: str


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where the files came from. `kind`: hub, registry, file, create; `revision` is a commit or a manifest's digest."""

    kind: str
    repo: str = ""
    revision: str = ""
    file: str = ""
    url: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """See the module. `name` is how the model is called, with the letters' case as it was first written.

    `parameters` are Ollama's option names, and `speculation`, with JSON values; `template` is a Jinja text, "" for the
    GGUF's own. `draft` is the name or the path of a smaller model that drafts for this one. `no_projector` is a clause
    that says why its projector is not among the files, where it was left out.
    """

    name: str
    files: tuple[StoredFile, ...]
    created_at: datetime
    source: Source
    parameters: dict[str, Any] = {}
    system: str = ""
    template: str = ""
    messages: tuple[Message, ...] = ()
    licence_text: str = ""
    requires: str = ""
    draft: str = ""
    no_projector: str = ""
    version: int = VERSION

    @property
    def main(self) -> StoredFile:
        """The model's first file; of an adapter that has a name of its own the adapter."""
        return (self.of_role(Role.MODEL) or self.of_role(Role.ADAPTER))[0]

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter that has a name of its own, and no model."""
        return not self.of_role(Role.MODEL)

    def of_role(self, role: Role) -> tuple[StoredFile, ...]:
        return tuple(file for file in self.files if file.role is role)


class ManifestKey(NamedTuple):
    """The four parts of a manifest's path, in lower case. Names that differ in the case of letters are the same."""

    host: str
    owner: str
    name: str
    tag: str

    @classmethod
    def of(cls, name: str) -> ManifestKey:
        """Raises BadRequest for what is not a name, for paths, and for the built-in model's name."""
        parsed = ModelName.parse(name)
        if parsed.kind is Kind.PATH:
            raise BadRequest(f"'{name}' is the path of a file; give the model a name", field="model")
        host, owner, bare = _parts(parsed)
        if (host, owner) == (LOCAL_HOST, LOCAL_OWNER) and bare == BUILT_IN:
            raise BadRequest(f"'{name}' is the built-in model's name; choose another", field="model")
        return cls(host, owner, bare, (parsed.tag or DEFAULT_TAG).lower())

    def path(self, folder: Path) -> Path:
        """The manifest's path below the models folder. A port's colon is no character for a file's name."""
        return folder / FOLDER / self.host.replace(":", "+") / self.owner / self.name / f"{self.tag}{_SUFFIX}"


def canonical(name: str) -> str:
    """The shortest spelling of a name, in the letters' case as given. Raises what `ManifestKey.of` raises."""
    key, parsed = ManifestKey.of(name), ModelName.parse(name)
    parts = parsed.name.split("/")
    if key.host in (HUB_HOST, LOCAL_HOST):
        parts = parts[-1:] if key.owner == LOCAL_OWNER and key.host == LOCAL_HOST else parts[-2:]
    return "/".join(parts) + ("" if key.tag == DEFAULT_TAG else f":{parsed.tag}")


def in_full(name: str, source: Source | None = None) -> str:
    """A model's name as Ollama writes it, which says the hub's host and the tag; clients compare it with that."""
    is_hub = source is not None and (
        name.lower().startswith(source.repo.lower()) if source.kind == "hub" else source.kind == "foreign"
    )
    if is_hub and name.count("/") == 1:
        name = f"{HUB_HOST}/{name}"
    elif name.lower().startswith(f"{OLLAMA_HOST}/"):
        name = name[len(OLLAMA_HOST) + 1 :]
    is_whole = ":" in name.rpartition("/")[2] or ModelName.parse(name).kind is Kind.PATH
    return name if is_whole else f"{name}:{DEFAULT_TAG}"


class DamagedFile(NamedTuple):
    """A manifest, a file of a model or a folder of the setting `model_dirs` that cannot be used, and why."""

    path: Path
    problem: str


class Survey(NamedTuple):
    """All manifests of a folder, by key, and those that cannot be read."""

    manifests: dict[ManifestKey, Manifest]
    damaged: Sequence[DamagedFile]

    @property
    def files(self) -> Iterator[StoredFile]:
        """Those of all manifests."""
        return (file for said in self.manifests.values() for file in said.files)


def check_digest(digest: str, *, field: str | None = None) -> str:
    """The digest as `sha256:<64 hex digits>`, from that or Ollama's `sha256-` form. Raises BadRequest for all else."""
    normal = re.sub(r"^sha256-", "sha256:", digest).lower()
    if not _DIGEST.fullmatch(normal):
        raise BadRequest(f"'{digest[:100]}' is no digest; it is sha256: and 64 hexadecimal digits", field=field)
    return normal


def blob_path(folder: Path, digest: str) -> Path:
    """Where a blob lies below the models folder. Raises BadRequest for a malformed digest."""
    return folder / "blobs" / check_digest(digest).replace(":", "-")


def file_path(folder: Path, hub_cache: Path, file: StoredFile) -> Path:
    """Where a file of a manifest lies. Raises BadModelFile when its digest or path is not what a place allows."""
    _check_file(file)
    if file.place is Place.BLOB:
        return blob_path(folder, file.digest)
    if file.place is Place.BUILT_IN:
        return builtin.model_path()
    return hub_cache / file.path if file.place is Place.HUB else Path(file.path)


def write(folder: Path, name: str, manifest: Manifest) -> Path:
    """Points `name` to the manifest, atomically. Raises BadRequest for the name, BadModelFile for what is in it."""
    path = ManifestKey.of(name).path(folder)
    _check(manifest)
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    if len(content) > MAX_MANIFEST_BYTES:
        raise BadModelFile(f"the manifest of '{name}' has {len(content)} bytes; the limit is {MAX_MANIFEST_BYTES}")
    with stored.replacing(path) as file:
        file.write(content)
    return path


def read(folder: Path, name: str) -> Manifest | None:
    """The manifest of that name, None if there is none. Raises BadModelFile for a damaged one, BadRequest."""
    key = ManifestKey.of(name)
    return _read(key.path(folder), key)


def remove(folder: Path, name: str) -> bool:
    """Forgets the name; its files stay. False if there was none."""
    path = ManifestKey.of(name).path(folder)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    stored.sync_folder(path.parent)
    for parent in list(path.parents)[:3]:
        try:
            parent.rmdir()
        except OSError:
            break
    return True


def read_all(folder: Path) -> Survey:
    """Every manifest below the models folder. One that cannot be read is reported, and in nobody's way."""
    found: dict[ManifestKey, Manifest] = {}
    damaged: list[DamagedFile] = []
    root = folder / FOLDER
    for path in sorted(root.glob(f"*/*/*/*{_SUFFIX}")):
        if path.name.startswith("."):
            continue
        host, owner, name, file_name = path.relative_to(root).parts
        key = ManifestKey(host.replace("+", ":"), owner, name, file_name.removesuffix(_SUFFIX))
        try:
            if ManifestKey.of("/".join(key[:3]) + f":{key.tag}") != key:
                raise BadRequest("its path is not one that a model's name has")
            manifest = _read(path, key)
        except (BadModelFile, BadRequest) as error:
            damaged.append(DamagedFile(path, error.message))
        else:
            if manifest is not None:
                found[key] = manifest
    return Survey(found, damaged)


def _parts(parsed: ModelName) -> tuple[str, str, str]:
    parts = parsed.name.lower().split("/")
    if parsed.is_hub:
        return HUB_HOST, parts[-2], parts[-1]
    if len(parts) == 1:
        return LOCAL_HOST, LOCAL_OWNER, parts[0]
    host, owner, bare = parts
    return host, owner, bare


def _read(path: Path, key: ManifestKey) -> Manifest | None:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        if len(content) > MAX_MANIFEST_BYTES:
            raise BadModelFile(f"it has more than {MAX_MANIFEST_BYTES} bytes")
        version = _version_decoder.decode(content).version
        if version > VERSION:
            raise BadModelFile(
                f"it was written by a newer localrun (version {version} of the format, this one knows {VERSION}); "
                f"upgrade localrun"
            )
        manifest = _decoder.decode(content)
        _check(manifest)
        if ManifestKey.of(manifest.name) != key:
            raise BadModelFile(f"it is that of '{manifest.name[:100]}'")
    except (msgspec.MsgspecError, UnicodeDecodeError, BadModelFile, BadRequest, RecursionError) as error:
        raise BadModelFile(f"{path} is no manifest of that model: {error}") from None
    return manifest


def _check(manifest: Manifest) -> None:
    if len(manifest.files) > MAX_FILES:
        raise BadModelFile(f"it names {len(manifest.files)} files; the limit is {MAX_FILES}")
    roles = [file.role for file in manifest.files if file.role is not Role.LICENCE]
    if Role.MODEL not in roles and roles != [Role.ADAPTER]:
        raise BadModelFile("it names no model file")
    for file in manifest.files:
        _check_file(file)


def _check_file(file: StoredFile) -> None:
    if file.size_bytes < 0:
        raise BadModelFile("a file in it has a negative size")
    if file.digest and not _DIGEST.fullmatch(file.digest):
        raise BadModelFile("a file in it has a malformed digest")
    if file.place is Place.BLOB:
        if not file.digest or file.path:
            raise BadModelFile("a blob in it needs a digest and no path")
        return
    if file.place is Place.BUILT_IN:
        return
    if "\0" in file.path or ".." in re.split(r"[/\\]", file.path):
        raise BadModelFile("a file in it has a path with '..' or a NUL in it")
    is_absolute = os.path.isabs(file.path) or file.path.startswith(("/", "\\")) or ":" in file.path[:2]
    if not file.path or is_absolute != (file.place is Place.FILE):
        raise BadModelFile("a file in it has a path that does not fit its place: relative for hub, absolute for file")


class _Versioned(msgspec.Struct):
    version: int = VERSION


_version_decoder = msgspec.json.Decoder(_Versioned)
_decoder = msgspec.json.Decoder(Manifest)
