"""The store's integrity: what is missing, cut short, changed or left over."""

from __future__ import annotations

import hashlib
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from localrun.doctor import Level
from localrun.doctor.stored_models import check_models
from localrun.models import builtin
from localrun.models.storage import manifest, model_files
from localrun.models.storage.manifest import Manifest, Place, Role, Source, StoredFile
from localrun.models.storage.other_programs import LM_STUDIO, Folder, OllamaStore, OtherPrograms
from localrun.models.storage.store import Store
from tests.models.handmade import ENTRIES, STRING, entry, file_bytes, text

LATER_S = 4e9


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models", hub_cache_folder=tmp_path / "hub")


@pytest.fixture
def blob(store: Store) -> Path:
    """A model `mine` whose one blob is the built-in model's file."""
    content = builtin.model_path().read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    path = store.blobs.folder / f"sha256-{digest}"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    file = StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=len(content), digest=f"sha256:{digest}")
    said = Manifest(name="mine", files=(file,), created_at=datetime.now(UTC), source=Source(kind="registry"))
    manifest.write(store.folder, "mine", said)
    return path


def problems(store: Store, *, is_deep: bool = False) -> list[tuple[str, str]]:
    found = check_models(store, now_s=LATER_S, is_deep=is_deep)
    return [(each.check, each.level.value) for each in found if each.level is not Level.OK]


def test_a_sound_store(store, blob):
    found = list(check_models(store, now_s=LATER_S, is_deep=True))
    assert [each.level for each in found] == [Level.OK, Level.OK]
    assert found[0].text.startswith("2 with ")
    assert found[1].text == "1 files were read in full"


def test_a_missing_blob(store, blob):
    blob.unlink()
    (found,) = [each for each in check_models(store, now_s=LATER_S, is_deep=False) if each.level is Level.FAIL]
    assert "mine" in found.text
    assert "is gone" in found.text
    assert "localrun rm" in found.remedy


def test_a_blob_that_was_cut_short(store, blob):
    blob.write_bytes(blob.read_bytes()[:-1])
    assert ("blobs", "fail") in problems(store)


def test_a_changed_byte_is_found_by_reading_all(store, blob):
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    assert problems(store) == []
    (found,) = [each for each in check_models(store, now_s=LATER_S, is_deep=True) if each.level is Level.FAIL]
    assert found.check == "digests"
    assert str(blob) in found.text
    assert "localrun rm mine" in found.remedy


def test_damaged_files_and_manifests(store, blob):
    (store.folder / "broken.gguf").write_bytes(b"GGUFnonsense")
    path = store.folder / "manifests/local/library/bad/latest.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert sorted(problems(store)) == [("models", "fail"), ("models", "warn")]


def test_leftovers(store, blob):
    other = b"nobody's"
    path = store.blobs.folder / f"sha256-{hashlib.sha256(other).hexdigest()}"
    path.write_bytes(other)
    (store.blobs.folder / f"sha256-{'0' * 64}.localrun-partial").write_bytes(b"half")
    found = [each for each in check_models(store, now_s=LATER_S, is_deep=False) if each.level is not Level.OK]
    assert [each.text.partition(" (")[0] for each in found] == ["1 blobs", "1 interrupted downloads"]
    assert all("localrun gc" in each.remedy for each in found)
    path.write_bytes(b"changed")
    assert ("digests", "fail") in problems(store, is_deep=True)


def test_an_empty_store(store, tmp_path: Path):
    assert problems(store, is_deep=True) == []
    shutil.rmtree(tmp_path / "models", ignore_errors=True)
    assert problems(store) == []


def test_models_of_other_programs_that_cannot_be_used_are_named_and_fail_nothing(tmp_path: Path):
    ollama, studio = tmp_path / "ollama", tmp_path / "studio"
    bad = ollama / "manifests/registry.ollama.ai/library/fox/latest"
    bad.parent.mkdir(parents=True)
    bad.write_text("{")
    studio.mkdir()
    (studio / "broken.gguf").write_bytes(b"GGUFnonsense")
    alien = (entry("general.architecture", STRING, text("alien")), *ENTRIES[1:])
    (studio / "alien.gguf").write_bytes(file_bytes(alien))
    shutil.copy(builtin.model_path(), studio / "sound.gguf")
    others = OtherPrograms((OllamaStore(ollama),), (Folder(studio, LM_STUDIO),))
    store = Store(tmp_path / "models", hub_cache_folder=tmp_path / "hub", others=others)
    found = list(check_models(store, now_s=LATER_S, is_deep=False))
    assert {each.level for each in found} == {Level.OK, Level.WARN}
    warned = [each.text for each in found if each.level is Level.WARN]
    assert len(warned) == 3
    assert all("\n" not in each for each in warned)
    for words in (("Ollama", "fox"), ("LM Studio", "broken.gguf"), ("LM Studio", "alien")):
        assert any(all(word in each for word in words) for each in warned), warned
    assert "1 of other programs, used in place" in [each.text for each in found]


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(folder: object) -> str:
        return "the folder cannot be read: Permission denied"

    monkeypatch.setattr(model_files, "problem_of_folder", refuse)
    store = Store(tmp_path / "models", hub_cache_folder=tmp_path / "hub", model_dirs=[tmp_path])
    (found,) = [each for each in check_models(store, now_s=LATER_S, is_deep=False) if each.level is not Level.OK]
    assert found.text == f"{tmp_path}: the folder cannot be read: Permission denied"
    assert "LOCALRUN_MODEL_DIRS" in found.remedy
