"""Takes models away: the name first, then the files that nobody else uses.

Used by the daemon's threads. A process that is killed in between leaves files without a name, which `garbage.py` finds;
a name without its files is never left.

Files that others keep stay: those in folders that another program fills, those that were in the shared Hugging Face
cache before localrun came, and every file that another name still needs.

Does not: unload a model (the daemon does, before).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from localrun.errors import BadModelFile, BadRequest, Conflict, ModelNotFound
from localrun.models import atomic_file, builtin, manifest
from localrun.models.manifest import Manifest, Place, StoredFile
from localrun.models.name import Kind, ModelName
from localrun.models.store import Origin, Store


class Kept(NamedTuple):
    """A file that stays, and why."""

    path: Path
    reason: str


class Removed(NamedTuple):
    """What a removal did. `freed_bytes` is the size of the files that are gone."""

    freed_bytes: int
    files: Sequence[Path]
    kept: Sequence[Kept]


def remove(store: Store, name: str) -> Removed:
    """Forgets a model and deletes the files that are its alone.

    Raises ModelNotFound; BadRequest for the built-in model, for a path and for a file in a folder that is not ours,
    with what to do instead; Conflict for a file of the models folder that another model is made of.
    """
    with store.changing:
        parsed = check(store, name)
        try:
            said = manifest.read(store.folder, name)
        except BadModelFile:
            # What it named is not known any more; what is left of it is garbage.
            manifest.remove(store.folder, name)
            return Removed(0, (), ())
        if said is not None:
            manifest.remove(store.folder, name)
            return release(store, said.files)
        return _remove_file(store, parsed)


def check(store: Store, name: str) -> ModelName:
    """Raises what `remove` raises for a name that cannot be removed, before anything is done about it."""
    parsed = ModelName.parse(name)
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
    if manifest.Key.of(name).path(store.folder).is_file():
        return parsed
    path, file_name, origin = store.file_named(parsed) or _not_found(name)
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


def release(store: Store, files: Iterable[StoredFile]) -> Removed:
    """Deletes those of `files` that no manifest names any more. To be called after the manifest that did is gone."""
    with store.changing:
        survey = manifest.read_all(store.folder)
        needed = {_identity(file): said.name for said in survey.manifests.values() for file in said.files}
        freed_bytes, gone, kept = 0, [], []
        for file in files:
            path = store.path_of(file)
            reason = _why_kept(file, needed.get(_identity(file)), has_damaged=bool(survey.damaged))
            if reason:
                kept.append(Kept(path, reason))
                continue
            try:
                n_bytes = store.delete(file)
            except OSError as error:
                kept.append(Kept(path, f"it cannot be deleted: {error.strerror or error}"))
                continue
            if path.is_file():
                kept.append(Kept(path, "it is being used to make another model"))
            else:
                freed_bytes += n_bytes
                gone.append(path)
        return Removed(freed_bytes, gone, kept)


def _why_kept(file: StoredFile, user: str | None, *, has_damaged: bool) -> str:
    """Empty when nothing speaks for keeping it."""
    if file.place is Place.FILE:
        return "it lies outside localrun's own files; delete it as you would any other file"
    if file.place is Place.BUILT_IN:
        return "it is built in"
    if user is not None:
        return f"'{user}' uses it"
    if file.adopted:
        return "it was in the Hugging Face cache before, for other programs"
    if has_damaged:
        return "a damaged manifest may name it (localrun list); localrun gc deletes it when that is gone"
    return ""


def _remove_file(store: Store, parsed: ModelName) -> Removed:
    """Deletes a GGUF file of the models folder; a damaged one as well."""
    path = (store.file_named(parsed) or _not_found(parsed.text))[0]
    paths = _files_of(store, path)
    size_bytes = 0
    # The first one last: killed in between, what is left is a model with a name that says what is missing.
    for each in reversed(paths):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += each.lstat().st_size
            each.unlink()
    atomic_file.sync_folder(path.parent)
    return Removed(size_bytes, paths, ())


def _files_of(store: Store, path: Path) -> Sequence[Path]:
    """All files of a split model, the file alone of any other, sound or not."""
    try:
        return store.sound_file(path).header.shard_paths or (path,)
    except BadModelFile:
        return (path,)


def _not_found(name: str) -> NoReturn:
    raise ModelNotFound(name)


def _users(store: Store, path: Path) -> Sequence[str]:
    def is_it(said: Manifest) -> bool:
        return any(file.place is Place.FILE and Path(file.path).resolve() == target for file in said.files)

    target = path.resolve()
    return sorted(said.name for said in manifest.read_all(store.folder).manifests.values() if is_it(said))


def _identity(file: StoredFile) -> tuple[Place, str]:
    return file.place, file.digest if file.place is Place.BLOB else file.path
