"""Gives a model a name: the one place that writes manifests of models that are complete.

Used by the daemon's threads, by whoever copies, creates or pulls. Until the manifest is written the name means what it
meant before; from then on it means the new model, and what only the old one used is deleted.

Does not: fetch or make the files.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localrun.errors import BadModelFile, Conflict
from localrun.models import manifest, removal
from localrun.models.header import Header
from localrun.models.manifest import Manifest, Place, Role, Source, StoredFile
from localrun.models.model import Model, Origin
from localrun.models.name import ModelName
from localrun.models.removal import Removed
from localrun.models.store import Store


def point(store: Store, name: str, said: Manifest) -> Removed:
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
        manifest.write(store.folder, name, changed(said, name=manifest.canonical(name)))
        return removal.release(store, before.files if before is not None else ())


def check_free(store: Store, name: str) -> None:
    """Raises Conflict when the name is that of a file of the models folder, and BadRequest when it is no name."""
    manifest.Key.of(name)
    found = store.file_named(ModelName.parse(name))
    if found is not None and found[2] is Origin.FOLDER:
        raise Conflict(
            f"'{name}' is the name of the file {found[0]}; choose another name, or remove that model first "
            f"(localrun rm {found[1]})"
        )


def copy(store: Store, source: str, destination: str) -> Removed:
    """A second name for a model. The files are shared, not copied; the copy outlives the first name.

    Raises what the store raises for the source, and what `point` raises for the destination.
    """
    with store.changing:
        model = store.resolve(source)
        said = described(model)
        if model.manifest is not None and manifest.Key.of(destination) == manifest.Key.of(model.name):
            return Removed(0, (), ())
        return point(store, destination, said)


def described(model: Model) -> Manifest:
    """A model's manifest; for a GGUF file as it lies, one that says no more than where that is."""
    if model.manifest is not None:
        return model.manifest
    files = files_in_place(model.header)
    if model.origin is Origin.BUILT_IN:
        files = (StoredFile(role=Role.MODEL, place=Place.BUILT_IN, size_bytes=model.size_bytes),)
    source = Source(kind=model.origin.value, file=str(model.path))
    return Manifest(name=model.name, files=files, created_at=model.modified_at, source=source)


def files_in_place(header: Header) -> tuple[StoredFile, ...]:
    """The file of a model, or all files of a split one, where they lie."""
    paths = header.shard_paths or (header.path,)
    return tuple(
        StoredFile(role=Role.MODEL, place=Place.FILE, size_bytes=path.stat().st_size, path=str(path)) for path in paths
    )


def changed(said: Manifest, **fields: Any) -> Manifest:
    """The manifest with other values in some fields."""
    return msgspec.structs.replace(said, **fields)
