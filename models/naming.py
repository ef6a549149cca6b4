"""Gives models names and takes them away: the one place that writes and removes manifests of models that are complete.

Used by the daemon's threads, by whoever copies, creates, pulls or removes. Until a manifest is written the name means
what it meant before; from then on it means the new model, and what only the old one used is deleted. A model is taken
away by its name first, then the files that nobody else uses: a process that is killed in between leaves files without a
name, which `collect_garbage` finds; a name without its files is never left.

Files that others keep stay: those in folders that another program fills, those that were in the shared Hugging Face
cache before localrun came, and every file that another name still needs. Garbage is: temporary files whose writer is
gone, files of downloads that were given up, and blobs that no manifest names. Blobs are spared while they are young,
for `create` uploads them before it names them, and all of them while a manifest is damaged, for it may name them.

Does not: fetch or make files, unload a model (the daemon does, before), or touch files that localrun did not write.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from localrun import stored
from localrun.errors import BadModelFile, BadRequest, Conflict, ModelNotFound, told_of
from localrun.models import builtin
from localrun.models.download.partial import find_stale, remove_stale
from localrun.models.gguf.header import Header
from localrun.models.name import Kind, ModelName, split_adapters
from localrun.models.storage import manifest, model_files
from localrun.models.storage.manifest import Manifest, Place, Role, Source, StoredFile
from localrun.models.storage.model import Model, NamedAdapter, Origin
from localrun.models.storage.other_programs import OLLAMA, name_in_ollama
from localrun.models.storage.store import Store


def point(store: Store, name: str, said: Manifest) -> Removal:
    """Points `name` to what `said` describes; its own name becomes the canonical form of `name`.

    What the replaced model alone used is deleted and returned. Raises BadRequest for the name, Conflict when a file of
    the models folder has it, BadModelFile for the manifest.
    """
    with store.changing:
        check_free(store, name)
        try:
            before = manifest.read(store.folder, name)
        except BadModelFile:
            before = None
        manifest.write(store.folder, name, msgspec.structs.replace(said, name=manifest.canonical(name)))
        return release(store, before.files if before is not None else ())


def check_free(store: Store, name: str) -> None:
    """Raises Conflict when the name is that of a file of the models folder, and BadRequest when it is no name."""
    manifest.ManifestKey.of(name)
    found = store.file_named(ModelName.parse(name))
    if found is not None and found.origin is Origin.FOLDER:
        raise Conflict(
            f"'{name}' is the name of the file {found.path}; choose another name, or remove that model first "
            f"(localrun rm {found.name})"
        )


def copy(store: Store, source: str, destination: str) -> Removal:
    """A second name for a model or an adapter. The files are shared, not copied; the copy outlives the first name.

    Raises what the store raises for the source, and what `point` raises for the destination.
    """
    with store.changing:
        with told_of("source"):
            model = store.find(source)
        said = described(model)
        with told_of("destination"):
            if model.manifest is not None and manifest.ManifestKey.of(destination) == manifest.ManifestKey.of(
                model.name
            ):
                return Removal(0, (), ())
            return point(store, destination, said)


def described(model: Model | NamedAdapter) -> Manifest:
    """A model's or an adapter's manifest; for a GGUF file as it lies, one that says no more than where that is."""
    if isinstance(model, Model):
        model.check_here()
    if model.manifest is not None:
        return model.manifest
    files: tuple[StoredFile, ...]
    if isinstance(model, NamedAdapter):
        files = (model.file,)
    elif model.origin is Origin.BUILT_IN:
        files = (StoredFile(role=Role.MODEL, place=Place.BUILT_IN, size_bytes=model.size_bytes),)
    else:
        files = files_in_place(model.header, model.projector_header)
    source = Source(kind=str(model.origin), file=str(model.path))
    return Manifest(name=model.name, files=files, created_at=model.modified_at, source=source)


def files_in_place(header: Header, projector: Header | None = None) -> tuple[StoredFile, ...]:
    """The file of a model, or all files of a split one, and its projector, where they lie."""
    parts = [(path, Role.MODEL) for path in header.shard_paths or (header.path,)]
    if projector is not None:
        parts.append((projector.path, Role.PROJECTOR))
    return tuple(
        StoredFile(role=role, place=Place.FILE, size_bytes=path.stat().st_size, path=str(path)) for path, role in parts
    )


class KeptFile(NamedTuple):
    """A file that stays, and why."""

    path: Path
    reason: str


class Removal(NamedTuple):
    """What a removal did. `freed_bytes` is the size of the files that are gone."""

    freed_bytes: int
    files: Sequence[Path]
    kept: Sequence[KeptFile]


def remove(store: Store, name: str) -> Removal:
    """Forgets a model and deletes the files that are its alone.

    Raises ModelNotFound; BadRequest for the built-in model, for a path and for a file in a folder that is not ours,
    with what to do instead; Conflict for a file of the models folder that another model is made of.
    """
    with store.changing:
        parsed = check_removable(store, name)
        name = parsed.text
        try:
            said = manifest.read(store.folder, name)
        except BadModelFile:
            # What it named is not known any more; what is left of it is garbage.
            manifest.remove(store.folder, name)
            return Removal(0, (), ())
        if said is not None:
            manifest.remove(store.folder, name)
            return release(store, said.files)
        return _remove_file(store, parsed)


def check_removable(store: Store, name: str) -> ModelName:
    """Raises what `remove` raises for a name that cannot be removed, before anything is done about it."""
    if adapters := split_adapters(name).adapters:
        raise BadRequest(
            f"'{name}' is a model with adapters, which are removed one by one (localrun rm {adapters[0][0]})",
            field="model",
        )
    parsed = store.meant(name)
    if parsed.kind is Kind.BUILT_IN:
        size_mb = builtin.model_path().stat().st_size / 1e6 if builtin.model_path().is_file() else 0.0
        raise BadRequest(
            f"'{name}' is built in ({size_mb:.1f} MB) and goes with localrun itself; it cannot be removed",
            field="model",
        )
    if parsed.kind is Kind.PATH:
        raise BadRequest(
            f"'{name}' is a file that localrun only reads; delete it as you would any other file", field="model"
        )
    if manifest.ManifestKey.of(parsed.text).path(store.folder).is_file():
        return parsed
    found = store.file_named(parsed)
    if found is None or found.origin is Origin.FOREIGN:
        for ollama, path in store.ollama_named(parsed):
            raise BadRequest(
                f"'{name}' is kept by {OLLAMA} in {ollama.folder}, which localrun only reads; to delete it, type: "
                f"ollama rm {name_in_ollama(path)}",
                field="model",
            )
    if found is None and manifest.ManifestKey.of(parsed.text) in store.cards:
        raise BadRequest(
            f"'{name}' is the cluster's, and not on this machine; `localrun cluster deploy {name} --replicas 0` takes "
            f"it back",
            field="model",
        )
    if found is None:
        raise ModelNotFound(name)
    path, file_name, origin, program = found
    if program:
        raise BadRequest(
            f"'{file_name}' is kept by {program}, and localrun only reads it; delete it in {program}, or type: "
            f"rm {shlex.quote(str(path))}",
            field="model",
        )
    if origin is Origin.FOREIGN:
        raise BadRequest(
            f"'{file_name}' is {path}, in a folder of the setting model_dirs, which localrun only reads; delete the "
            f"file there, or take the folder out of the setting",
            field="model",
        )
    users = _users(store, path)
    if users:
        raise Conflict(f"'{file_name}' is used by {', '.join(users)}; remove that first (localrun rm {users[0]})")
    return parsed


def release(store: Store, files: Iterable[StoredFile]) -> Removal:
    """Deletes those of `files` that no manifest names any more. To be called after the manifest that did is gone."""
    with store.changing:
        survey = manifest.read_all(store.folder)
        needed = {_identity(file): said.name for said in survey.manifests.values() for file in said.files}
        freed_bytes, gone, kept = 0, [], []
        for file in files:
            path = store.path_of(file)
            reason = _why_kept(file, needed.get(_identity(file)), is_in_doubt=_is_in_doubt(store, survey))
            if reason:
                kept.append(KeptFile(path, reason))
                continue
            try:
                n_bytes = store.delete(file)
            except OSError as error:
                kept.append(KeptFile(path, f"it cannot be deleted: {error.strerror or error}"))
                continue
            if path.is_file():
                kept.append(KeptFile(path, "it is being used to make another model"))
            else:
                freed_bytes += n_bytes
                gone.append(path)
        return Removal(freed_bytes, gone, kept)


def _is_in_doubt(store: Store, survey: manifest.Survey) -> bool:
    """Whether a manifest cannot be read, or names a blob that is not there: it may have named another before it was
    damaged."""
    blobs = (file.digest for file in survey.files if file.place is Place.BLOB)
    return bool(survey.damaged) or not all(map(store.blobs.has, blobs))


def _why_kept(file: StoredFile, user: str | None, *, is_in_doubt: bool) -> str:
    """Empty when nothing speaks for keeping it."""
    if file.place is Place.BUILT_IN:
        return "it is built in"
    if user is not None:
        return f"'{user}' uses it"
    if file.place is Place.FILE:
        return "it belongs to you or to another program, and localrun deletes nothing but its own files"
    if file.adopted:
        return "it was in the Hugging Face cache before, for other programs"
    if is_in_doubt:
        return "a damaged manifest may name it (localrun list); localrun gc deletes it when that is gone"
    return ""


def _remove_file(store: Store, parsed: ModelName) -> Removal:
    """Deletes a GGUF file of the models folder, a damaged one as well, and the projector that is its alone."""
    found = store.file_named(parsed)
    if found is None:
        raise ModelNotFound(parsed.text)
    path = found.path
    paths = [*_files_of(store, path), *_own_projector(store, path)]
    size_bytes = 0
    # The first one last: killed in between, what is left is a model with a name that says what is missing.
    for each in reversed(paths):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += each.lstat().st_size
            each.unlink()
    stored.sync_folder(path.parent)
    return Removal(size_bytes, paths, ())


def _files_of(store: Store, path: Path) -> Sequence[Path]:
    """All files of a split model, the file alone of any other, sound or not."""
    try:
        return store.sound_file(path).header.shard_paths or (path,)
    except BadModelFile:
        return (path,)


def _own_projector(store: Store, path: Path) -> Sequence[Path]:
    """The projector beside a model file, unless another file or name uses it, or it is beside what a link leads to."""
    found = store.projector_beside(path)
    if found is None or found.parent != path.parent or _users(store, found):
        return ()
    others = (other for other, _ in model_files.in_folder(path.parent) if other != path)
    return () if any(store.projector_beside(other) == found for other in others) else (found,)


def _users(store: Store, path: Path) -> Sequence[str]:
    def is_it(said: Manifest) -> bool:
        return any(file.place is Place.FILE and Path(file.path).resolve() == target for file in said.files)

    target = path.resolve()
    return sorted(said.name for said in manifest.read_all(store.folder).manifests.values() if is_it(said))


def _identity(file: StoredFile) -> tuple[Place, str]:
    return file.place, file.digest if file.place is Place.BLOB else file.path


# An upload and the `create` that names it are minutes apart at most.
MIN_AGE_S = 3600.0
# A pull that was broken off may be gone on with days later.
PARTIAL_MIN_AGE_S = 14 * 24 * 3600.0


class GarbageReport(NamedTuple):
    """What was deleted, and what was spared: the number of unnamed blobs, and the bytes of interrupted downloads."""

    freed_bytes: int
    files: list[Path]
    kept_blobs: int
    kept_partial_bytes: int


def collect_garbage(
    store: Store, *, now_s: float, min_age_s: float = MIN_AGE_S, partial_min_age_s: float = PARTIAL_MIN_AGE_S
) -> GarbageReport:
    """Deletes the garbage. `now_s` is Unix time; unnamed blobs younger than `min_age_s` stay, and downloads of which
    the last byte came less than `partial_min_age_s` ago."""
    with store.changing:
        freed_bytes, kept_partial_bytes, files = 0, 0, []
        folders = (store.blobs.folder, store.hub_cache_folder)
        for left in find_stale(folders, now_s=now_s, min_age_s=0):
            if not left.is_stale(partial_min_age_s):
                kept_partial_bytes += left.size_bytes
                continue
            with contextlib.suppress(OSError):
                freed_bytes += remove_stale(left)
                files += [path for path in left.paths if not path.exists()]
        manifests = store.folder / manifest.FOLDER
        for path in chain.from_iterable(map(stored.stale, (store.folder, *sorted(manifests.glob("*/*/*/"))))):
            with contextlib.suppress(OSError):
                size_bytes = path.lstat().st_size
                path.unlink()
                freed_bytes += size_bytes
                files.append(path)
        survey = manifest.read_all(store.folder)
        named = {file.digest for file in survey.files}
        is_in_doubt = _is_in_doubt(store, survey)
        kept_blobs = 0
        for blob in store.blobs.all():
            if blob.digest in named:
                continue
            if is_in_doubt or now_s - blob.modified_at_s < min_age_s:
                kept_blobs += 1
                continue
            with contextlib.suppress(OSError):
                n_bytes = store.blobs.remove(blob.digest)
                if not blob.path.exists():
                    freed_bytes += n_bytes
                    files.append(blob.path)
        for folder in chain.from_iterable(map(manifests.glob, ("*/*/*/", "*/*/", "*/"))):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return GarbageReport(freed_bytes, files, kept_blobs, kept_partial_bytes)
