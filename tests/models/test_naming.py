"""Names, copies, removal and garbage: what goes, what stays, and why."""

from __future__ import annotations

import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from localrun.errors import BadModelFile, BadRequest, Conflict, ModelNotFound
from localrun.models import builtin, naming
from localrun.models.download.partial import allocated_bytes
from localrun.models.storage import manifest
from localrun.models.storage.blobs import BlobWriter
from localrun.models.storage.manifest import Manifest, Place, Role, Source, StoredFile
from localrun.models.storage.store import Store
from tests.models.test_shards import split_copy

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(builtin, "model_path", lambda: tiny_gguf)
    for folder in ("models", "foreign"):
        (tmp_path / folder).mkdir()
    return Store(tmp_path / "models", model_dirs=[tmp_path / "foreign"], hub_cache_folder=tmp_path / "hub")


@pytest.fixture
def blob(store: Store, tiny_gguf: Path) -> StoredFile:
    with BlobWriter(store.blobs) as writer:
        writer.write(tiny_gguf.read_bytes())
        return StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=writer.n_bytes, digest=writer.finish())


def name(store: Store, text: str, *files: StoredFile) -> naming.Removal:
    source = Source(kind="create")
    return naming.point(store, text, Manifest(name="any", files=files, created_at=NOW, source=source))


def test_a_file_goes_with_its_last_name(store: Store, blob: StoredFile) -> None:
    name(store, "one", blob)
    naming.copy(store, "one", "two")
    first = naming.remove(store, "one")
    assert first.freed_bytes == 0
    assert [kept.reason for kept in first.kept] == ["'two' uses it"]
    second = naming.remove(store, "two")
    assert (second.freed_bytes, second.files) == (blob.size_bytes, [store.path_of(blob)])
    assert [model.name for model in store.list()] == ["tiny"]
    with pytest.raises(ModelNotFound):
        naming.remove(store, "one")


def test_what_a_new_meaning_replaces_goes(store: Store, blob: StoredFile, tiny_gguf: Path) -> None:
    name(store, "fox", blob)
    naming.copy(store, "tiny", "fox")
    assert store.resolve("fox").path == tiny_gguf
    assert store.blobs.all() == []


def test_copies_outlive_and_share(store: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    for source in ("tiny", str(tmp_path / "some.gguf"), "lying"):
        shutil.copyfile(tiny_gguf, tmp_path / "some.gguf")
        shutil.copyfile(tiny_gguf, store.folder / "lying.gguf")
        naming.copy(store, source, "me/copy:v1")
        copied = store.resolve("me/copy:V1")
        assert (copied.name, copied.path) == ("me/copy:v1", store.resolve(source).path)
    assert naming.copy(store, "me/copy:v1", "hf.co/me/copy:v1") == (0, (), ())
    with pytest.raises(ModelNotFound):
        naming.copy(store, "nothing", "other")
    with pytest.raises(Conflict, match="choose another name"):
        naming.copy(store, "tiny", "lying")
    for wrong in ("tiny", "../x", "x.gguf", ""):
        with pytest.raises(BadRequest):
            naming.copy(store, "lying", wrong)


def test_the_built_in_model_and_foreign_files_stay(store: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    (tmp_path / "foreign" / "deep").mkdir()
    theirs = tmp_path / "foreign" / "deep" / "theirs.gguf"
    shutil.copyfile(tiny_gguf, theirs)
    assert store.resolve("theirs").path == theirs
    assert [model.name for model in store.list()] == ["tiny", "theirs"]
    for wanted, message in (
        ("tiny", "is built in"),
        (str(theirs), "delete it as you would any other file"),
        ("theirs", "delete the file there, or take the folder out of the setting"),
    ):
        with pytest.raises(BadRequest, match=message):
            naming.remove(store, wanted)
    naming.copy(store, "theirs", "mine")
    (kept,) = naming.remove(store, "mine").kept
    assert kept.path == theirs
    assert theirs.is_file()


def test_a_file_of_the_models_folder(store: Store, tiny_gguf: Path) -> None:
    shutil.copyfile(tiny_gguf, store.folder / "fox-q4.gguf")
    naming.copy(store, "fox:q4", "user")
    with pytest.raises(Conflict, match="used by user"):
        naming.remove(store, "fox:q4")
    naming.remove(store, "user")
    assert naming.remove(store, "fox:q4").freed_bytes == tiny_gguf.stat().st_size
    (store.folder / "bad.gguf").write_bytes(b"not a model")
    assert naming.remove(store, "bad").freed_bytes == 11
    assert list(store.folder.glob("*.gguf")) == []


def test_a_split_model_goes_whole(store: Store, tiny_gguf: Path) -> None:
    split_copy(tiny_gguf, store.folder)
    shards = list(store.folder.glob("copy-*.gguf"))
    assert len(shards) > 1
    assert [model.name for model in store.list()] == ["tiny", "copy"]
    assert store.damaged() == []
    size_bytes = sum(path.stat().st_size for path in shards)
    assert store.resolve("copy").size_bytes == size_bytes
    naming.copy(store, "copy", "other")
    assert store.resolve("other").size_bytes == size_bytes
    naming.remove(store, "other")
    assert naming.remove(store, "copy").freed_bytes == size_bytes
    assert [path for path in shards if path.exists()] == []


def test_files_of_the_hubs_cache(store: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    def cached(file: str, *, adopted: bool = False) -> StoredFile:
        path = tmp_path / "hub" / "models--a--b" / "snapshots" / ("c" * 40) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tiny_gguf, path)
        size_bytes, relative = path.stat().st_size, str(path.relative_to(tmp_path / "hub"))
        return StoredFile(role=Role.MODEL, place=Place.HUB, size_bytes=size_bytes, path=relative, adopted=adopted)

    ours, theirs = cached("ours.gguf"), cached("theirs.gguf", adopted=True)
    name(store, "a/b:ours", ours)
    name(store, "a/b:theirs", theirs)
    assert naming.remove(store, "a/b:ours").freed_bytes == ours.size_bytes
    (kept,) = naming.remove(store, "a/b:theirs").kept
    assert "Hugging Face" in kept.reason
    assert not store.path_of(ours).exists()
    assert store.path_of(theirs).is_file()


def test_a_model_runs_without_a_file_that_nobody_reads(store: Store, blob: StoredFile) -> None:
    lost = {
        role: StoredFile(role=role, place=Place.BLOB, size_bytes=1, digest=f"sha256:{number:064x}")
        for number, role in enumerate(Role)
    }
    name(store, "fox", blob, lost[Role.PROJECTOR], lost[Role.LICENCE])
    name(store, "half", blob, lost[Role.MODEL])
    name(store, "changed", blob, lost[Role.ADAPTER])
    assert store.resolve("fox").path == store.path_of(blob)
    for damaged in ("half", "changed"):
        with pytest.raises(BadModelFile, match="is gone; create it again"):
            store.resolve(damaged)


def test_a_model_whose_file_is_gone_or_manifest_is_damaged_can_be_removed(store: Store, blob: StoredFile) -> None:
    name(store, "lost", blob)
    store.path_of(blob).unlink()
    assert naming.remove(store, "lost").freed_bytes == 0
    path = manifest.ManifestKey.of("damaged").path(store.folder)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert [file.path for file in store.damaged()] == [path]
    naming.remove(store, "damaged")
    assert store.damaged() == []


@pytest.mark.parametrize("written", ["{", None], ids=["cut off", "another digest"])
def test_nothing_is_deleted_that_a_damaged_manifest_may_name(
    store: Store, blob: StoredFile, written: str | None
) -> None:
    name(store, "fox", blob)
    name(store, "other", blob)
    path = manifest.ManifestKey.of("other").path(store.folder)
    whole = path.read_bytes()
    path.write_text(written or whole.decode().replace(blob.digest, f"sha256:{64 * 'a'}"))
    (kept,) = naming.remove(store, "fox").kept
    assert "damaged manifest" in kept.reason
    assert naming.collect_garbage(store, now_s=time.time(), min_age_s=0).kept_blobs == 1
    path.write_bytes(whole)
    assert store.resolve("other").size_bytes == blob.size_bytes


def test_garbage(store: Store, blob: StoredFile) -> None:
    name(store, "fox", blob)
    with BlobWriter(store.blobs) as writer:
        writer.write(b"uploaded, never named")
        writer.finish()
    stray = [store.blobs.folder, manifest.ManifestKey.of("fox").path(store.folder).parent, store.folder]
    left = [folder / f".{os.getpid()}-{index:016x}.localrun-temp" for index, folder in enumerate(stray)]
    for path in left:
        path.write_bytes(b"half")
    (store.folder / "manifests" / "some" / "empty" / "name").mkdir(parents=True)
    now_s = time.time()
    first = naming.collect_garbage(store, now_s=now_s, min_age_s=3600)
    assert (set(first.files), first.kept_blobs) == (set(left), 1)
    assert first.freed_bytes >= 12
    second = naming.collect_garbage(store, now_s=now_s + 3601, min_age_s=3600)
    assert (len(second.files), second.kept_blobs) == (1, 0)
    assert store.resolve("fox").path == store.path_of(blob)
    assert naming.collect_garbage(store, now_s=now_s, min_age_s=0) == (0, [], 0, 0)
    assert [path.name for path in (store.folder / "manifests").iterdir()] == ["local"]


def test_downloads_that_were_given_up(store: Store, tmp_path: Path) -> None:
    partial = tmp_path / "hub" / "models--a--b" / "blobs" / "etag.localrun-partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half")
    now_s = time.time()
    kept = naming.collect_garbage(store, now_s=now_s)
    assert (kept.files, kept.kept_partial_bytes) == ([], allocated_bytes(partial))
    assert naming.collect_garbage(store, now_s=now_s + naming.PARTIAL_MIN_AGE_S + 60).files == [partial]


def test_what_is_being_made_is_no_garbage(store: Store, blob: StoredFile) -> None:
    with store.blobs.held([blob.digest]):
        assert naming.collect_garbage(store, now_s=time.time() + 1e6).files == []
    assert naming.collect_garbage(store, now_s=time.time() + 1e6).files == [store.path_of(blob)]
