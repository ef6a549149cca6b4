"""The models on this machine: the built-in one, those with a manifest, and GGUF files as they lie; and the adapters,
which are named in the same way.

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
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import NamedTuple

from localrun.config import Settings, folders, model_dirs, models_folder
from localrun.errors import BadModelFile, BadRequest, LocalrunError, ModelNotFound, NotFound
from localrun.models import builtin, quant_choice
from localrun.models.gguf import projectors
from localrun.models.gguf.header import FileKind, Header
from localrun.models.name import BUILT_IN, DEFAULT_TAG, Kind, ModelName
from localrun.models.storage import hub_cache, manifest, model_files, other_programs
from localrun.models.storage.blobs import Blobs
from localrun.models.storage.manifest import DamagedFile, Manifest, ManifestKey, Place, Role, StoredFile, in_full
from localrun.models.storage.model import Evidence, Found, Model, NamedAdapter, Origin, OwnAdapter, sha256_of
from localrun.models.storage.model_files import NAMED, SUFFIX, ModelFile, ModelFiles
from localrun.models.storage.other_programs import OLLAMA, Folder, OllamaStore, OtherPrograms, name_in_ollama

# The GGUF files of folders, while all of a folder's models are looked at.
Listings = dict[Path, Sequence[str]]


class FoundFile(NamedTuple):
    """A GGUF file by its name, sound or not."""

    path: Path
    name: str
    origin: Origin
    program: str = ""


class _Projection(NamedTuple):
    """A model's projector, if it has one that can be used; else why not, where there is anything to say."""

    path: Path | None = None
    header: Header | None = None
    problem: str = ""


_TOO_FULL = (
    f"only the first {model_files.MAX_ENTRIES:,} files and folders below it were looked at, so models may be missing; "
    "name the models' own folder in model_dirs, or run a file by its path"
)
# What `Model.no_projector` may end with: the way to a projector.
_BESIDE = "put its projector (mmproj) into the same folder, or name it in a Modelfile (a second FROM)"


class Store:
    """`models_folder` and the others need not exist: then only the built-in model and paths are found.

    `no_projectors` is a clause that says why no projector is used here at all; "" where they are.
    """

    def __init__(
        self,
        models_folder: Path,
        *,
        model_dirs: Sequence[Path] = (),
        hub_cache_folder: Path | None = None,
        others: OtherPrograms | None = None,
        no_projectors: str = "",
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
        self._no_projectors = no_projectors
        # What a cluster runs and this machine has not, by its name: asked last, and replaced as a whole.
        self.cards: Mapping[ManifestKey, Model | NamedAdapter] = {}

    @classmethod
    def of(cls, settings: Settings, environ: Mapping[str, str] = os.environ, *, no_projectors: str = "") -> Store:
        """The one that settings name, with what other programs have here."""
        own = folders(environ)
        return cls(
            models_folder(settings, environ), model_dirs=model_dirs(settings),
            others=other_programs.found(own.cache, environ), no_projectors=no_projectors,
        )  # fmt: skip

    def resolve(self, name: str) -> Model:
        """The model that a client means by `name`.

        Raises BadRequest for a malformed name and for an adapter's, ModelNotFound, and BadModelFile for a file that is
        there but unusable.
        """
        found = self.find(name)
        if isinstance(found, NamedAdapter):
            raise BadRequest(
                f"'{found.name}' is no model but {_described(found)}, and runs with a model only: ask for "
                f"MODEL+{found.name}",
                field="model",
            )
        return found

    def adapter(self, name: str, *, field: str) -> NamedAdapter:
        """The adapter that a client means by `name`, in the field `field`. Raises NotFound, BadRequest for a malformed
        name and for a model's, and BadModelFile."""
        try:
            found = self.find(name)
        except ModelNotFound:
            raise adapter_not_found(name, field) from None
        except BadRequest as error:
            text = error.message.replace("the model name", "the adapter's name")
            raise BadRequest(f"{_where(field)}{text}", field=field) from None
        if isinstance(found, Model):
            raise BadRequest(f"{_where(field)}'{found.name}' is no adapter but a model", field=field)
        return found

    def find(self, name: str) -> Model | NamedAdapter:
        """The model or the adapter of that name. Raises as `resolve` does."""
        parsed = self.meant(name)
        found: Model | NamedAdapter | None
        if parsed.kind is Kind.BUILT_IN:
            found = self._load(_built_in())
        elif parsed.kind is Kind.PATH:
            # Not resolved further: a link's target may not end in .gguf, and then its name would not be a path's.
            path = Path(os.path.abspath(parsed.text))
            found = self._load(FoundFile(path, str(path), Origin.PATH))
        else:
            found = self._find(parsed)
        if found is None:
            raise ModelNotFound(name)
        return found

    def meant(self, name: str) -> ModelName:
        """The checked name: of `owner/name`, where the hub's is not here, the model that Ollama calls so, if that is.
        Raises BadRequest."""
        parsed = ModelName.parse(name)
        other = parsed.in_ollama
        return parsed if other is None or self._has(parsed) or not self._has(other) else other

    def _has(self, name: ModelName) -> bool:
        return ManifestKey.of(name.text).path(self.folder).is_file() or any(self.ollama_named(name))

    def evidence(self, name: str) -> Evidence:
        """To be asked for before `resolve`; as long as it holds, the name means the same. Raises BadRequest for a
        malformed name."""
        parsed = ModelName.parse(name)
        if parsed.kind is not Kind.STORED:
            # Besides the file itself it means the projector in its folder.
            paths = (os.path.abspath(parsed.text), os.path.realpath(parsed.text)) if parsed.kind is Kind.PATH else ()
            return Evidence.of([Path(path).parent for path in paths])
        other = parsed.in_ollama
        keys = [ManifestKey.of(each.text) for each in (parsed, other) if each is not None]
        theirs = [store.usual_path(key) for store in self._ollama for key in keys]
        folders = [folder.path for folder in self._foreign]
        return Evidence.of((*(key.path(self.folder) for key in keys), self.folder, *theirs, *folders))

    def list(self) -> list[Model]:
        """All sound models: the built-in one first, then the others by name. Unusable files are left out."""
        return [model for model in self.survey() if isinstance(model, Model)]

    def adapters(self) -> Sequence[NamedAdapter]:
        """All sound adapters that have names, oldest first, so that a new one changes nobody's place."""
        found = [adapter for adapter in self.survey() if isinstance(adapter, NamedAdapter)]
        return sorted(found, key=lambda adapter: (adapter.modified_at, adapter.name))

    def damaged(self) -> Sequence[DamagedFile]:
        """The files and manifests that `list` leaves out, and why."""
        return [file for file in self.survey() if isinstance(file, DamagedFile)]

    def sound_file(self, path: Path, kind: str = FileKind.MODEL) -> ModelFile:
        """A GGUF file anywhere, a model or a part for one. Raises BadModelFile when it is none, not sound, or not
        there."""
        is_adapter = kind == FileKind.ADAPTER
        file = self._files.load(path, NAMED if is_adapter or kind == FileKind.MODEL else kind)
        if file is None:
            raise BadModelFile(f"there is no file {path}")
        if file.is_adapter and kind == FileKind.MODEL:
            raise BadModelFile(f"{path.name} is not a language model but a part for one ({file.header.kind})")
        if is_adapter and not file.is_adapter:
            raise BadModelFile(f"{path.name} is no adapter but a {file.header.kind}")
        return file

    def path_of(self, file: StoredFile) -> Path:
        """Where a file of a manifest lies. Raises BadModelFile."""
        return manifest.file_path(self.folder, self.hub_cache_folder, file)

    def known_digests(self, found: Found) -> dict[Path, str]:
        """Of its files, as its manifest says them; none without one."""
        files = found.manifest.files if found.manifest is not None else ()
        return {self.path_of(file): file.digest for file in files if file.digest}

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

    def adapter_sha256(self, file: StoredFile) -> str:
        """64 hex digits of the content of an adapter that a manifest names. Raises BadModelFile."""
        path = self.path_of(file)
        return file.sha256 or sha256_of(path, self.sound_file(path, FileKind.ADAPTER).header)

    def model_of(self, said: Manifest) -> Model:
        """The model that a manifest describes. Raises BadModelFile when a file of it is gone or damaged."""
        path = self.path_of(said.main)
        file = self._file_of(said, path)
        # Without its licence or its projector a model answers to text all the same.
        for other in (*said.of_role(Role.MODEL), *said.of_role(Role.ADAPTER)):
            if not self.path_of(other).is_file():
                raise _gone(said, self.path_of(other))
        projection = self._projection_of(said, file.header)
        return Model(
            name=said.name,
            path=path,
            # Of a model in shards the header counts all.
            size_bytes=file.size_bytes + sum(other.size_bytes for other in said.files if other.role is not Role.MODEL),
            modified_at=said.created_at,
            header=file.header,
            origin=Origin.MANIFEST,
            manifest=said,
            adapters=tuple(OwnAdapter(other, self.path_of(other)) for other in said.of_role(Role.ADAPTER)),
            projector=projection.path,
            projector_header=projection.header,
            no_projector=projection.problem,
        )

    # --- projectors ----------------------------------------------------------------------------------------------

    def projector_beside(self, path: Path, listings: Listings | None = None) -> Path | None:
        """The projector in a model file's folder that belongs to it, sound or not; else that in the folder of the file
        that it is a link to. `listings` keeps what the folders have, for whoever asks for all of their files."""
        listings = {} if listings is None else listings
        for at in dict.fromkeys((path, Path(os.path.realpath(path)))):
            if at.parent not in listings:
                try:
                    listings[at.parent] = list(filter(model_files.is_gguf, os.listdir(at.parent)))
                except OSError:
                    listings[at.parent] = []
            if found := quant_choice.projector_in_folder(at.name, listings[at.parent]):
                return at.with_name(found)
        return None

    def projector_for(self, path: Path, model: Header) -> Header | None:
        """That of the projector in a model file's folder, if there is one that can be used."""
        return self._projection_beside(path, model, None).header

    def _projection_of(self, said: Manifest, model: Header) -> _Projection:
        """What a manifest says of it."""
        files = said.of_role(Role.PROJECTOR)
        again = said.source.kind in ("hub", "registry")
        if files:
            path = self.path_of(files[0])
            if path.is_file():
                return self._projection(path, model)
            way_out = f"`localrun pull {said.name}` gets it again" if again else "create the model again"
            return _Projection(problem=f"its projector {path} is gone; {way_out}")
        if said.no_projector:
            return _Projection(problem=said.no_projector)
        if said.source.kind == Origin.FOREIGN or not projectors.sees(model):
            return _Projection()
        way_out = f"`localrun pull {said.name}` again gets it if its repository has one" if again else _BESIDE
        return _Projection(problem=_is_missing(model, way_out))

    def _projection_beside(self, path: Path, model: Header, listings: Listings | None) -> _Projection:
        """What lies in the folder of a model file."""
        found = self.projector_beside(path, listings)
        if found is not None:
            return self._projection(found, model)
        return _Projection(problem=_is_missing(model, _BESIDE)) if projectors.sees(model) else _Projection()

    def _projection(self, path: Path, model: Header) -> _Projection:
        if self._no_projectors:
            return _Projection(problem=self._no_projectors)
        try:
            header = self.sound_file(path, "projector").header
        except BadModelFile as error:
            return _Projection(problem=f"its projector cannot be used: {error.message}")
        if problem := projectors.fit_problem(header, model):
            return _Projection(problem=f"its projector cannot be used: {path.name} {problem}")
        return _Projection(path, header)

    # --- finding -------------------------------------------------------------------------------------------------

    def _find(self, wanted: ModelName) -> Model | NamedAdapter | None:
        """A manifest by that name, else a file: letter for letter if there is one, else whatever the case."""
        said = manifest.read(self.folder, wanted.text)
        if said is not None:
            return self._of_manifest(said)
        found = self._named(wanted, self._own_files())
        problem = ""
        if found is None:
            for store, path in self.ollama_named(wanted):
                try:
                    return self._model_of_ollama(store, path)
                except BadModelFile as error:
                    problem = error.message
            found = self._named(wanted, self._foreign_files())
        if found is not None:
            return self._load(found)
        card = self.cards.get(ManifestKey.of(wanted.text))
        if card is None and problem:
            raise ModelNotFound(wanted.text, problem)
        return card

    def ollama_named(self, wanted: ModelName) -> Iterator[tuple[OllamaStore, Path]]:
        """The manifests that Ollama has of a name, sound or not."""
        for store in self._ollama:
            if (path := store.find(ManifestKey.of(wanted.text))) is not None:
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

    def _foreign_files(self, too_full: MutableSequence[Path] | None = None) -> Iterator[FoundFile]:
        for folder, program in self._foreign:
            for path, name in model_files.below_folder(folder, too_full):
                yield FoundFile(path, name, Origin.FOREIGN, program)

    def survey(self) -> Iterator[Model | NamedAdapter | DamagedFile]:
        """What `list`, `adapters` and `damaged` tell apart, by one look at the disk."""
        built_in = self._surveyed(_built_in())
        if built_in is not None:
            yield built_in
        known: dict[str, Model | NamedAdapter] = {}
        survey = manifest.read_all(self.folder)
        unusable = [*survey.damaged]
        for key, said in survey.manifests.items():
            try:
                known[said.name] = self._of_manifest(said)
            except BadModelFile as error:
                unusable.append(DamagedFile(key.path(self.folder), error.message))
        unusable += self._survey_files(self._own_files(), survey.manifests, known)
        for store in self._ollama:
            unusable += self._survey_ollama(store, survey.manifests, known)
        too_full: list[Path] = []
        unusable += self._survey_files(self._foreign_files(too_full), survey.manifests, known)
        unusable += [DamagedFile(folder, _TOO_FULL) for folder in too_full]
        for folder in self._model_dirs:
            problem = model_files.problem_of_folder(folder)
            if problem:
                unusable.append(DamagedFile(folder, problem))
        if self.cards:
            names = set(map(ManifestKey.of, known))
            known |= {card.name: card for key, card in self.cards.items() if key not in names}
        yield from sorted(known.values(), key=lambda model: model.name)
        yield from sorted(unusable)

    def _survey_files(
        self,
        files: Iterator[FoundFile],
        manifests: Mapping[ManifestKey, Manifest],
        known: dict[str, Model | NamedAdapter],
    ) -> Iterator[DamagedFile]:
        """Adds the sound ones to `known`."""
        listings: Listings = {}
        for file in files:
            path, name = file.path, file.name
            try:
                _check_stored_name(name)
            except BadRequest as error:
                yield DamagedFile(path, error.message)
                continue
            hiding = self._hiding(name, manifests, known)
            if hiding is None:
                found = self._surveyed(file, listings)
                if isinstance(found, DamagedFile):
                    yield found
                elif found is not None:
                    known[name] = found
            elif hiding != path:
                way_out = "use its path" if file.program else "rename it"
                yield DamagedFile(path, f"{path.name} is hidden by another model of its name; {way_out}")

    def _survey_ollama(
        self, store: OllamaStore, manifests: Mapping[ManifestKey, Manifest], known: dict[str, Model | NamedAdapter]
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

    def _hiding(
        self, name: str, manifests: Mapping[ManifestKey, Manifest], known: Mapping[str, Model | NamedAdapter]
    ) -> Path | None:
        """The file of the model that is meant by a file's name instead of that file."""
        said = manifests.get(ManifestKey.of(name))
        if said is not None:
            return self.path_of(said.main)
        return known[name].path if name in known else None

    def _surveyed(
        self, found: FoundFile, listings: Listings | None = None
    ) -> Model | NamedAdapter | DamagedFile | None:
        try:
            return self._load(found, listings)
        except BadModelFile as error:
            return DamagedFile(found.path, error.message)

    # --- loading -------------------------------------------------------------------------------------------------

    def _load(self, found: FoundFile, listings: Listings | None = None) -> Model | NamedAdapter | None:
        """The model or adapter in a file; None when there is none. `listings` as in `projector_beside`. Raises
        BadModelFile."""
        path, name, origin, program = found
        file = self._files.load(path)
        if file is None:
            return None
        if file.is_adapter:
            return NamedAdapter(
                name, file.path, file.size_bytes, file.modified_at, file.header, origin, program=program
            )
        projection = _Projection()
        if origin is not Origin.BUILT_IN:
            projection = self._projection_beside(path, file.header, listings)
        return Model(
            name=name,
            path=file.path,
            size_bytes=file.size_bytes + (0 if projection.header is None else projection.header.size_bytes),
            modified_at=file.modified_at,
            header=file.header,
            origin=origin,
            program=program,
            projector=projection.path,
            projector_header=projection.header,
            no_projector=projection.problem,
        )

    def _of_manifest(self, said: Manifest) -> Model | NamedAdapter:
        """Raises BadModelFile when a file of it is gone or damaged."""
        if not said.is_adapter:
            return self.model_of(said)
        path = self.path_of(said.main)
        file = self._file_of(said, path)
        return NamedAdapter(
            said.name, path, file.size_bytes, said.created_at, file.header, Origin.MANIFEST, manifest=said
        )

    def _model_of_ollama(self, store: OllamaStore, path: Path) -> Model:
        """The model of one of Ollama's manifests. Raises BadModelFile, also for one that no engine here can load."""
        said = store.read(path)
        return dataclasses.replace(self.model_of(said), origin=Origin.FOREIGN, program=OLLAMA)

    def _file_of(self, said: Manifest, path: Path) -> ModelFile:
        try:
            file = self._files.load(path)
        except BadModelFile as error:
            raise BadModelFile(f"model '{said.name}' cannot be used: {error.message}") from None
        if file is None:
            raise _gone(said, path)
        if file.is_adapter != said.is_adapter:
            raise BadModelFile(f"'{said.name}' cannot be used: {path} is the file of another kind of thing now")
        return file


def _built_in() -> FoundFile:
    return FoundFile(builtin.model_path(), BUILT_IN, Origin.BUILT_IN)


def _described(adapter: NamedAdapter) -> str:
    architecture = adapter.facts.architecture
    article = "an" if adapter.facts.kind.startswith("a") else "a"
    return f"{article} {adapter.facts.kind}" + (f" for {architecture} models" if architecture else "")


def _is_missing(model: Header, way_out: str) -> str:
    return f"models like this one ({model.architecture}) take images with a projector, which is not here: {way_out}"


def _gone(said: Manifest, path: Path) -> BadModelFile:
    if said.source.kind == Origin.FOREIGN:
        name = in_full(said.name, said.source)
        return BadModelFile(f"the file {path} of model '{name}' is not there; `ollama pull {name}` gets it")
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


def adapter_not_found(name: str, field: str) -> NotFound:
    """For an adapter that is asked for in this field and is not here."""
    return NotFound(f"{_where(field)}adapter '{name[:200]}' not found; `localrun list` shows what is here", field=field)


def _where(field: str) -> str:
    """What stands in the model's name needs no other; not every API's errors have a place for the field."""
    return "" if field == "model" else f"{field}: "
