"""The model store: damaged files, blobs that are missing, cut short or not what their name says, and leftovers;
and what the caches hold.

Does not: delete or repair anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from localrun.doctor import Finding, fail, ok, size, warn
from localrun.errors import LocalrunError
from localrun.kv_folders import ModelFolder
from localrun.models.download.partial import find_stale
from localrun.models.gguf import tables
from localrun.models.storage import manifest
from localrun.models.storage.blobs import hash_file
from localrun.models.storage.manifest import StoredFile
from localrun.models.storage.model import Model, NamedAdapter
from localrun.models.storage.store import Store

PARTIAL_MIN_AGE_S = 3600.0


def check_models(store: Store, *, now_s: float, is_deep: bool) -> Iterator[Finding]:
    """`now_s` is Unix time. With `is_deep` every file with a digest is read whole, which takes a while."""
    n_models, n_bytes, n_foreign = 0, 0, 0
    for found in store.survey():
        if isinstance(found, Model):
            if not found.program:
                n_models += 1
                n_bytes += found.size_bytes
            elif problem := tables.problem(found.header.metadata):
                yield warn("models", f"'{found.name}' of {found.program} {problem}", "use another GGUF of this model")
            else:
                n_foreign += 1
        elif isinstance(found, NamedAdapter):
            continue  # sound, as it is listed
        elif program := store.others.owner_of(found.path):
            yield warn("models", f"{program}: {found.problem}", f"repair or remove it with {program} ({found.path})")
        elif store.folder / manifest.FOLDER in found.path.parents:
            yield fail("models", found.problem, f"pull the model again, or remove it with `localrun rm` ({found.path})")
        elif os.path.isdir(found.path):
            yield warn("models", f"{found.path}: {found.problem}", "make it readable, or correct LOCALRUN_MODEL_DIRS")
        else:
            yield warn("models", f"{found.path}: {found.problem}", "pull or copy the file again, or delete it")
    yield ok("models", f"{n_models} with {size(n_bytes)}, {store.folder}")
    if n_foreign:
        yield ok("models", f"{n_foreign} of other programs, used in place")
    yield from _check_files(store, is_deep=is_deep)
    yield from _check_leftovers(store, now_s=now_s)


def _check_files(store: Store, *, is_deep: bool) -> Iterator[Finding]:
    """Sizes, and with `is_deep` digests, of what manifests name; then of blobs that none does."""
    survey = manifest.read_all(store.folder)
    seen: dict[Path, str] = {}
    n_read = 0
    for said in survey.manifests.values():
        for file in said.files:
            path = _path(store, file)
            if path is None or path in seen:
                continue
            seen[path] = file.digest
            actual_bytes = path.stat().st_size
            if actual_bytes != file.size_bytes:
                yield fail(
                    "blobs", f"{path} of model '{said.name}' has {actual_bytes} bytes instead of {file.size_bytes}",
                    f"localrun rm {said.name}, then pull it again",
                )  # fmt: skip
            elif is_deep and file.digest:
                n_read += 1
                yield from _check_digest(path, file.digest, f"localrun rm {said.name}, then pull it again")
    for blob in store.blobs.all():
        if is_deep and blob.path not in seen:
            n_read += 1
            yield from _check_digest(blob.path, blob.digest, f"delete it: {blob.path}")
    if is_deep:
        yield ok("digests", f"{n_read} files were read in full")


def _check_digest(path: Path, digest: str, remedy: str) -> Iterator[Finding]:
    try:
        found = hash_file(path)
    except (OSError, LocalrunError) as error:
        yield warn("digests", f"{path} cannot be read in full: {error}", "run this again when nothing is writing to it")
        return
    if found != digest:
        yield fail("digests", f"{path} has changed: {found} instead of {digest}", remedy)


def _check_leftovers(store: Store, *, now_s: float) -> Iterator[Finding]:
    survey = manifest.read_all(store.folder)
    named = {file.digest for file in survey.files}
    unnamed = [blob for blob in store.blobs.all() if blob.digest not in named]
    folders = (store.blobs.folder, store.hub_cache_folder)
    partial = list(find_stale(folders, now_s=now_s, min_age_s=PARTIAL_MIN_AGE_S))
    if unnamed and not survey.damaged:
        n_bytes = sum(blob.size_bytes for blob in unnamed)
        yield warn("leftovers", f"{len(unnamed)} blobs ({size(n_bytes)}) that no model uses", "localrun gc")
    if partial:
        yield warn(
            "leftovers",
            f"{len(partial)} interrupted downloads",
            "resume them with `localrun pull`, or delete them with `localrun gc`",
        )


def _path(store: Store, file: StoredFile) -> Path | None:
    """None for a file that is missing, which the survey has told of, or that has no fixed content."""
    try:
        path = store.path_of(file)
    except LocalrunError:
        return None
    return path if file.place is not manifest.Place.BUILT_IN and path.is_file() else None


# --- the caches: how much they hold, and what of it belongs to no model any more ---


def check_kv_cache(folders: Sequence[ModelFolder], *, limit_bytes: int, root: Path) -> Iterator[Finding]:
    """`folders` are those of `kv_folders.survey`."""
    used_bytes = sum(folder.size_bytes for folder in folders)
    limit = f"at most {size(limit_bytes)}" if limit_bytes else "switched off"
    yield ok("cache", f"{size(used_bytes)} of saved prompts ({limit}), {root}")
    gone_bytes = sum(folder.size_bytes for folder in folders if folder.is_abandoned)
    if gone_bytes:
        yield warn("cache", f"{size(gone_bytes)} belong to models that no longer exist", "localrun cache prune")


def check_hub_cache(root: Path) -> Finding:
    """The cache that other programs share."""
    n_bytes = 0
    for folder, _, names in os.walk(root):
        # Snapshots link to what lies in blobs.
        if Path(folder).name == "blobs":
            n_bytes += sum((Path(folder) / name).lstat().st_size for name in names)
    return ok("cache", f"{size(n_bytes)} in the Hugging Face cache, {root}")
