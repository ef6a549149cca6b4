"""The models on this machine: the built-in one, those with a manifest, and GGUF files as they lie.

Owned by the daemon; safe to call from several threads. Everything is read anew on every call, so a file that is copied
in or deleted is seen at once (headers alone are remembered, see model_files.py). A name means, in this order: the
built-in model, a manifest, a file of the models folder, a model of Ollama's store, a file of the folders that the
setting `model_dirs` names or another program fills (other_programs.py). A model of Ollama's that no engine here can
load is listed as unusable, and its name is free. Paths are only made of checked names, of folder entries, and of
`.gguf` paths that the user gave.

What changes the store (naming.py, creation.py, and whoever pulls) does so while it holds `changing`, so that nobody
removes what somebody else is about to name.

Does not: read weights, watch folders, or download.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from localrun.errors import BadModelFile, BadRequest, LocalrunError, ModelNotFound
from localrun.models import builtin
from localrun.models.gguf import architectures
from localrun.models.gguf.header import Header
from localrun.models.name import BUILT_IN, DEFAULT_TAG, Kind, ModelName
from localrun.models.storage import hub_cache, manifest, model_files
from localrun.models.storage.blobs import Blobs
from localrun.models.storage.manifest import Key, Manifest, Message, Place, Role, Source, StoredFile
from localrun.models.storage.model_files import SUFFIX, ModelFile, ModelFiles
from localrun.models.storage.other_programs import OLLAMA, Folder, OllamaStore, OtherPrograms, name_in_ollama

_DIGEST_CHUNK_BYTES = 1024 * 1024


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

    `path` is the file to load, of a model in several shards the first; `size_bytes` counts all of its files. `program`
    is the one that keeps a foreign model, "" where that is not known.
    """

    name: str
    path: Path
    size_bytes: int
    modified_at: datetime
    header: Header
    origin: Origin = Origin.PATH
    manifest: Manifest | None = None
    adapters: tuple[Path, ...] = ()
    program: str = ""

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
        digest.update(self.draft.encode())
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
    def draft(self) -> str:
        """Name or path of the smaller model that drafts for it; "" for none."""
        return self.manifest.draft if self.manifest else ""

    @property
    def speculates(self) -> bool | None:
        """Whether its requests draft that do not say so themselves; None leaves it to the daemon."""
        value = self.parameters.get("speculation")
        return value if isinstance(value, bool) else None

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

    @property
    def source(self) -> Source:
        """Where it came from. A file that was not pulled came from itself."""
        if self.manifest:
            return self.manifest.source
        return Source(kind=self.origin.value, repo=self.program, file=str(self.path))


class Evidence(NamedTuple):
    """What tells that a name may have come to mean another file: what `paths` were like when it was looked up. A file
    itself is not looked at."""

    paths: Sequence[Path]
    stamps: Sequence[tuple[int, int] | None]

    def holds(self) -> bool:
        """Whether all is as it was: a few looks at the disk, cheap enough for an event loop."""
        return all(map(operator.eq, map(_stamp, self.paths), self.stamps))


class FoundFile(NamedTuple):
    """A GGUF file by its name, sound or not."""

    path: Path
    name: str
    origin: Origin
    program: str = ""


class DamagedFile(NamedTuple):
    """A file, a manifest or a folder of the setting `model_dirs` that cannot be used, and why."""

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
            while left > 0 and (chunk := file.read(min(left, _DIGEST_CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise BadModelFile(f"{model.path.name} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


class Store:
    """`models_folder` and the others need not exist: then only the built-in model and paths are found."""

    def __init__(
        self,
        models_folder: Path,
        *,
        model_dirs: Sequence[Path] = (),
        hub_cache_folder: Path | None = None,
        others: OtherPrograms | None = None,
    ) -> None:
        self.folder = models_folder
        self.others = OtherPrograms() if others is None else others
        self._ollama = self.others.ollama
        self._model_dirs = tuple(model_dirs)
        self._foreign = (*map(Folder, model_dirs), *self.others.folders)
        self.hub_cache_folder = hub_cache.folder() if hub_cache_folder is None else hub_cache_folder
        self.blobs = Blobs(models_folder)
        self.changing = threading.RLock()
        self._held_hub_paths: Counter[str] = Counter()
        self._held_lock = threading.Lock()
        self._files = ModelFiles()

    def resolve(self, name: str) -> Model:
        """The model that a client means by `name`.

        Raises BadRequest for a malformed name, ModelNotFound, and BadModelFile for a file that is there but unusable.
        """
        parsed = ModelName.parse(name)
        if parsed.kind is Kind.BUILT_IN:
            found = self._load(builtin.model_path(), BUILT_IN, Origin.BUILT_IN)
        elif parsed.kind is Kind.PATH:
            # Not resolved further: a link's target may not end in .gguf, and then its name would not be a path's.
            path = Path(os.path.abspath(parsed.text))
            found = self._load(path, str(path), Origin.PATH)
        else:
            found = self._find(parsed)
        if found is None:
            raise ModelNotFound(name)
        return found

    def evidence(self, name: str) -> Evidence:
        """To be asked for before `resolve`; as long as it holds, the name means the same. Raises BadRequest for a
        malformed name."""
        if ModelName.parse(name).kind is not Kind.STORED:
            return Evidence((), ())
        key = Key.of(name)
        theirs = [store.usual_path(key) for store in self._ollama]
        folders = [folder.path for folder in self._foreign]
        paths = (key.path(self.folder), self.folder, *theirs, *folders)
        return Evidence(paths, [_stamp(path) for path in paths])

    def list(self) -> list[Model]:
        """All sound models: the built-in one first, then the others by name. Unusable files are left out."""
        return [model for model in self.survey() if isinstance(model, Model)]

    def damaged(self) -> Sequence[DamagedFile]:
        """The files and manifests that `list` leaves out, and why."""
        return [file for file in self.survey() if isinstance(file, DamagedFile)]

    def sound_file(self, path: Path) -> ModelFile:
        """A GGUF file anywhere. Raises BadModelFile when it is not sound, or not there."""
        file = self._files.load(path)
        if file is None:
            raise BadModelFile(f"there is no file {path}")
        return file

    def path_of(self, file: StoredFile) -> Path:
        """Where a file of a manifest lies. Raises BadModelFile."""
        return manifest.file_path(self.folder, self.hub_cache_folder, file)

    @contextlib.contextmanager
    def held(self, files: Sequence[StoredFile]) -> Iterator[None]:
        """While in here none of these files is removed: the manifest that names them is not written yet."""
        hub_paths = [file.path for file in files if file.place is Place.HUB]
        with self.blobs.held([file.digest for file in files if file.place is Place.BLOB]):
            with self._held_lock:
                self._held_hub_paths.update(hub_paths)
            try:
                yield
            finally:
                with self._held_lock:
                    self._held_hub_paths.subtract(hub_paths)
                    self._held_hub_paths += Counter()  # drops the zeros

    def delete(self, file: StoredFile) -> int:
        """Deletes a blob or a file of the hub's cache. Bytes freed; 0 if it is gone or held. Raises OSError."""
        if file.place is Place.BLOB:
            return self.blobs.remove(file.digest)
        with self._held_lock:
            return 0 if self._held_hub_paths[file.path] else hub_cache.remove(self.hub_cache_folder, file.path)

    def model_of(self, said: Manifest) -> Model:
        """The model that a manifest describes. Raises BadModelFile when a file of it is gone or damaged."""
        first = said.of_role(Role.MODEL)[0]
        path = self.path_of(first)
        file = self._file_of(said, path)
        # Without its licence or its projector, which nobody here reads, a model answers all the same.
        for other in (*said.of_role(Role.MODEL), *said.of_role(Role.ADAPTER)):
            if not self.path_of(other).is_file():
                raise _gone(said, self.path_of(other))
        return Model(
            name=said.name,
            path=path,
            # Of a model in shards the header counts all.
            size_bytes=file.size_bytes + sum(other.size_bytes for other in said.files if other.role is not Role.MODEL),
            modified_at=said.created_at,
            header=file.header,
            origin=Origin.MANIFEST,
            manifest=said,
            adapters=tuple(self.path_of(other) for other in said.of_role(Role.ADAPTER)),
        )

    # --- finding -------------------------------------------------------------------------------------------------

    def _find(self, wanted: ModelName) -> Model | None:
        """A manifest by that name, else a file: letter for letter if there is one, else whatever the case."""
        said = manifest.read(self.folder, wanted.text)
        if said is not None:
            return self.model_of(said)
        found = self._named(wanted, self._own_files())
        if found is None:
            for store, path in self.ollama_named(wanted):
                with contextlib.suppress(BadModelFile):
                    return self._model_of_ollama(store, path)
            found = self._named(wanted, self._foreign_files())
        return None if found is None else self._load(*found)

    def ollama_named(self, wanted: ModelName) -> Iterator[tuple[OllamaStore, Path]]:
        """The manifests that Ollama has of a name, sound or not."""
        for store in self._ollama:
            if (path := store.find(Key.of(wanted.text))) is not None:
                yield store, path

    def file_named(self, wanted: ModelName) -> FoundFile | None:
        """The GGUF file that a name means where there is no manifest of it, sound or not."""
        # Foreign folders may be large and slow; they are not looked at for what the models folder has.
        return self._named(wanted, self._own_files()) or self._named(wanted, self._foreign_files())

    def _named(self, wanted: ModelName, files: Iterator[FoundFile]) -> FoundFile | None:
        stems = [f"{wanted.name}-{wanted.tag or DEFAULT_TAG}"]
        if wanted.tag is None or wanted.tag.lower() == DEFAULT_TAG:
            stems.insert(0, wanted.name)
        found = list(files)
        for stem in stems:
            for file in sorted(found, key=lambda file: file.name != stem):
                if file.name.lower() == stem.lower():
                    return file
        return None

    def _own_files(self) -> Iterator[FoundFile]:
        for path, name in model_files.in_folder(self.folder):
            yield FoundFile(path, name, Origin.FOLDER)

    def _foreign_files(self) -> Iterator[FoundFile]:
        for folder, program in self._foreign:
            for path, name in model_files.below_folder(folder):
                yield FoundFile(path, name, Origin.FOREIGN, program)

    def survey(self) -> Iterator[Model | DamagedFile]:
        """What `list` and `damaged` tell apart, by one look at the disk."""
        built_in = self._surveyed(builtin.model_path(), BUILT_IN, Origin.BUILT_IN)
        if built_in is not None:
            yield built_in
        known: dict[str, Model] = {}
        unusable: list[DamagedFile] = []
        survey = manifest.read_all(self.folder)
        unusable += [DamagedFile(path, problem) for path, problem in survey.damaged]
        for key, said in survey.manifests.items():
            try:
                known[said.name] = self.model_of(said)
            except BadModelFile as error:
                unusable.append(DamagedFile(key.path(self.folder), error.message))
        unusable += self._survey_files(self._own_files(), survey.manifests, known)
        for store in self._ollama:
            unusable += self._survey_ollama(store, survey.manifests, known)
        unusable += self._survey_files(self._foreign_files(), survey.manifests, known)
        for folder in self._model_dirs:
            problem = model_files.problem_of_folder(folder)
            if problem:
                unusable.append(DamagedFile(folder, problem))
        yield from sorted(known.values(), key=lambda model: model.name)
        yield from sorted(unusable)

    def _survey_files(
        self, files: Iterator[FoundFile], manifests: Mapping[Key, Manifest], known: dict[str, Model]
    ) -> Iterator[DamagedFile]:
        """Adds the sound ones to `known`."""
        for file in files:
            path, name = file.path, file.name
            try:
                _check_stored_name(name)
            except BadRequest as error:
                yield DamagedFile(path, error.message)
                continue
            hiding = self._hiding(name, manifests, known)
            if hiding is None:
                found = self._surveyed(*file)
                if isinstance(found, Model):
                    known[name] = found
                elif found is not None:
                    yield found
            elif hiding != path:
                way_out = "use its path" if file.program else "rename it"
                yield DamagedFile(path, f"{path.name} is hidden by another model of its name; {way_out}")

    def _survey_ollama(
        self, store: OllamaStore, manifests: Mapping[Key, Manifest], known: dict[str, Model]
    ) -> Iterator[DamagedFile]:
        """Adds the sound ones to `known`. What is here under its name already needs no second mention."""
        for _, path in store.manifests():
            if self._hiding(manifest.canonical(name_in_ollama(path)), manifests, known) is None:
                try:
                    found = self._model_of_ollama(store, path)
                except BadModelFile as error:
                    yield DamagedFile(path, error.message)
                else:
                    known[found.name] = found

    def _hiding(self, name: str, manifests: Mapping[Key, Manifest], known: Mapping[str, Model]) -> Path | None:
        """The file of the model that is meant by a file's name instead of that file."""
        said = manifests.get(Key.of(name))
        if said is not None:
            return self.path_of(said.of_role(Role.MODEL)[0])
        return known[name].path if name in known else None

    def _surveyed(self, path: Path, name: str, origin: Origin, program: str = "") -> Model | DamagedFile | None:
        try:
            return self._load(path, name, origin, program)
        except BadModelFile as error:
            return DamagedFile(path, error.message)

    # --- loading -------------------------------------------------------------------------------------------------

    def _load(self, path: Path, name: str, origin: Origin, program: str = "") -> Model | None:
        """The model at `path`; None when there is no file. Raises BadModelFile."""
        file = self._files.load(path)
        if file is None:
            return None
        return Model(name, file.path, file.size_bytes, file.modified_at, file.header, origin, program=program)

    def _model_of_ollama(self, store: OllamaStore, path: Path) -> Model:
        """The model of one of Ollama's manifests. Raises BadModelFile, also for one that no engine here can load."""
        said = store.read(path)
        model = self.model_of(said)
        if problem := architectures.problem(model.header.metadata):
            word = said.name.rpartition("/")[2].partition(":")[0]
            raise BadModelFile(f"'{said.name}' {problem}; look for another GGUF of it (localrun search {word})")
        return dataclasses.replace(model, origin=Origin.FOREIGN, program=OLLAMA)

    def _file_of(self, said: Manifest, path: Path) -> ModelFile:
        try:
            file = self._files.load(path)
        except BadModelFile as error:
            raise BadModelFile(f"model '{said.name}' cannot be used: {error.message}") from None
        if file is None:
            raise _gone(said, path)
        return file


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _gone(said: Manifest, path: Path) -> BadModelFile:
    if said.source.kind == Origin.FOREIGN:
        return BadModelFile(f"the file {path} of model '{said.name}' is gone; {said.source.repo} has to pull it again")
    again = "create it" if said.source.kind in ("create", "file") else "pull it"
    return BadModelFile(
        f"the file {path} of model '{said.name}' is gone; {again} again, or forget it (localrun rm {said.name})"
    )


def _check_stored_name(name: str) -> None:
    """Raises BadRequest when a file of this name could not be asked for by it."""
    try:
        parsed = ModelName.parse(name)
    except LocalrunError:
        raise BadRequest(f"{name}{SUFFIX} has a name that no model can have; rename it, or use its path") from None
    if parsed.kind is Kind.BUILT_IN:
        raise BadRequest(f"{name}{SUFFIX} has the name of the built-in model; rename it, or use its path")
    if parsed.kind is not Kind.STORED or parsed.name != name:
        raise BadRequest(f"{name}{SUFFIX} has a name that no model can have; rename it, or use its path")
