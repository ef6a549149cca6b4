"""Finding models by what people call them."""

from __future__ import annotations

import errno
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import BadModelFile, BadRequest, ModelNotFound
from localrun.models import builtin, naming
from localrun.models.gguf import reader
from localrun.models.storage import hub_cache, model_files
from localrun.models.storage.manifest import DamagedFile
from localrun.models.storage.model import Origin
from localrun.models.storage.store import Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    models.mkdir()
    return models


@pytest.fixture
def models(folder: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose built-in model is the synthesized one."""
    monkeypatch.setattr(builtin, "model_path", lambda: tiny_gguf)
    return Store(folder)


def put(source: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copyfile(source, folder / name)


def test_the_built_in_model_needs_no_folder(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "model_path", lambda: tiny_gguf)
    models = Store(tmp_path / "nowhere")
    assert [model.name for model in models.list()] == ["tiny"]
    assert {models.resolve(name).name for name in ("tiny", "tiny:latest", "localrun/tiny")} == {"tiny"}
    assert models.resolve("tiny").path == tiny_gguf


def test_an_installation_without_the_built_in_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "model_path", lambda: folder / "missing.gguf")
    models = Store(folder)
    assert models.list() == []
    with pytest.raises(ModelNotFound):
        models.resolve("tiny")


def test_files_of_the_folder_are_found_by_name_and_tag(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "smol.gguf", "qwen-q4_0.gguf", "qwen-Q8_0.gguf")
    assert [model.name for model in models.list()] == ["tiny", "qwen-Q8_0", "qwen-q4_0", "smol"]
    for asked, found in {
        "smol": "smol", "smol:latest": "smol", "SMOL": "smol", "qwen:q4_0": "qwen-q4_0", "qwen:Q4_0": "qwen-q4_0",
        "qwen:q8_0": "qwen-Q8_0", "qwen-Q8_0": "qwen-Q8_0", "qwen-q8_0:latest": "qwen-Q8_0",
    }.items():  # fmt: skip
        assert models.resolve(asked).name == found, asked


def test_the_same_letters_win_over_the_same_name_in_other_case(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "Smol.gguf", "smol.gguf")
    if len(list(folder.iterdir())) < 2:
        pytest.skip("the file system takes both for one name")
    assert models.resolve("smol").path.name == "smol.gguf"
    assert models.resolve("Smol").path.name == "Smol.gguf"


@pytest.mark.parametrize("name", ["nothing", "smol:q4_0", "owner/smol", "hf.co/owner/smol:Q4_0", "./nothing.gguf"])
def test_what_is_not_here_is_not_found(name: str, models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "smol.gguf")
    with pytest.raises(ModelNotFound, match=name):
        models.resolve(name)


def test_a_malformed_name_is_a_bad_request(models: Store) -> None:
    with pytest.raises(BadRequest):
        models.resolve("../smol")


def test_a_path_is_used_where_it_lies(
    models: Store, tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tiny_gguf, tmp_path, "file.gguf")
    monkeypatch.chdir(tmp_path)
    by_relative, by_absolute = models.resolve("./file.gguf"), models.resolve(str(Path.cwd() / "file.gguf"))
    assert by_relative.header is by_absolute.header
    assert by_relative.name == str(by_relative.path) == str(Path.cwd() / "file.gguf")
    assert models.resolve(by_relative.name).path == by_relative.path
    assert [model.name for model in models.list()] == ["tiny"]


def test_a_link_to_a_file_of_another_name_is_called_by_the_link(models: Store, tmp_path: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, tmp_path, "blob")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "blob")
    model = models.resolve(str(tmp_path / "link.gguf"))
    assert models.resolve(model.name).path == model.path


def test_facts_about_a_model(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "smol.gguf")
    os.utime(folder / "smol.gguf", (1_700_000_000, 1_700_000_000))
    model = models.resolve("smol")
    assert model.size_bytes == tiny_gguf.stat().st_size
    assert model.modified_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert (model.header.architecture, model.header.quantization) == ("llama", "Q4_0")


def test_what_macos_keeps_beside_a_file_on_another_disk_is_no_model(
    models: Store, folder: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    put(tiny_gguf, folder, "smol.gguf")
    for name in ("._smol.gguf", "._mmproj-smol.gguf", "._other.gguf"):
        (folder / name).write_bytes(b"\0\5\x16\7" + bytes(4092))
    assert [model.name for model in models.list()] == ["tiny", "smol"]
    assert models.damaged() == []
    assert models.projector_beside(folder / "smol.gguf") is None
    with pytest.raises(ModelNotFound):
        models.resolve("other")

    commit = "a" * 40
    repository = hub_cache.RepoCache(tmp_path / "hub", "org/repo")
    snapshots = repository.folder / "snapshots"
    (snapshots / commit).mkdir(parents=True)
    put(tiny_gguf, snapshots / commit, "smol.gguf")
    for twin in (snapshots / f"._{commit}", snapshots / commit / "._smol.gguf"):
        twin.write_bytes(b"\0\5\x16\7")
    assert repository.commit_of("main") == commit, "the only one, in a cache without refs"
    assert [file.path for file in repository.files(commit)] == ["smol.gguf"]


def test_damaged_files_are_reported_and_hide_no_others(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "good.gguf", "tiny.gguf", "white space.gguf", "a:b.gguf")
    (folder / "cut.gguf").write_bytes(tiny_gguf.read_bytes()[:100_000])
    (folder / "empty.gguf").touch()
    (folder / "folder.gguf").mkdir()
    (folder / "notes.txt").write_text("not a model")
    (folder / "lost.gguf").symlink_to(folder / "nowhere")
    os.truncate(folder / "good.gguf", tiny_gguf.stat().st_size)
    os.utime(folder / "good.gguf", (1e11, 1e11))
    assert [model.name for model in models.list()] == ["tiny", "good"]
    problems = {file.path.name: file.problem for file in models.damaged()}
    assert set(problems) == {"cut.gguf", "empty.gguf", "folder.gguf", "tiny.gguf", "white space.gguf", "a:b.gguf"}
    assert "truncated" in problems["cut.gguf"]
    assert "rename it" in problems["tiny.gguf"]
    with pytest.raises(BadModelFile, match=r"cut\.gguf is truncated"):
        models.resolve("cut")


def test_headers_are_parsed_once_while_a_file_stays_the_same(
    models: Store, folder: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    read_named = reader.read_named
    monkeypatch.setattr(reader, "read_named", lambda path: parsed.append(path.name) or read_named(path))
    put(tiny_gguf, folder, "good.gguf")
    (folder / "bad.gguf").write_bytes(b"GGUF")
    for _ in range(3):
        models.list()
        models.resolve("good")
        models.damaged()
    assert sorted(parsed) == ["bad.gguf", "good.gguf", tiny_gguf.name]
    shutil.copyfile(tiny_gguf, folder / "bad.gguf")
    assert models.resolve("bad").header.n_layers == 4
    assert parsed.count("bad.gguf") == 2


def test_files_come_and_go(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "smol.gguf")
    assert models.resolve("smol")
    (folder / "smol.gguf").unlink()
    assert [model.name for model in models.list()] == ["tiny"]
    with pytest.raises(ModelNotFound):
        models.resolve("smol")


def test_the_digest_is_an_id_of_the_file(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "one.gguf")
    (folder / "two.gguf").symlink_to(folder / "one.gguf")
    digest = models.resolve("one").digest
    assert len(bytes.fromhex(digest)) == 32
    assert models.resolve("two").digest == Store(folder).resolve("one").digest == digest
    os.utime(folder / "one.gguf", (2_000_000, 2_000_000))
    assert models.resolve("one").digest != digest


def test_the_digest_of_a_file_that_is_gone(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "smol.gguf")
    model = models.resolve("smol")
    (folder / "smol.gguf").unlink()
    with pytest.raises(BadModelFile, match=r"smol\.gguf cannot be read"):
        assert model.digest


def test_a_manifest_comes_before_a_file_and_own_files_before_foreign_ones(
    folder: Path, tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "model_path", lambda: tiny_gguf)
    foreign = tmp_path / "foreign"
    deep = foreign.joinpath("owner", "repo", *"abcdefghij")
    deep.mkdir(parents=True)
    put(tiny_gguf, foreign / "owner" / "repo", "smol.gguf", "theirs.gguf", "mmproj-theirs.gguf")
    put(tiny_gguf, deep, "deep.gguf")
    models = Store(folder, model_dirs=[foreign, tmp_path / "nowhere"])
    naming.copy(models, "theirs", "fox")
    put(tiny_gguf, folder, "smol.gguf", "fox.gguf")
    assert [(model.name, model.origin) for model in models.list()] == [
        ("tiny", Origin.BUILT_IN), ("deep", Origin.FOREIGN), ("fox", Origin.MANIFEST), ("smol", Origin.FOLDER),
        ("theirs", Origin.FOREIGN),
    ]  # fmt: skip
    assert models.resolve("fox").path == foreign / "owner" / "repo" / "theirs.gguf"
    assert models.resolve("smol").path == folder / "smol.gguf"
    hidden = {file.path: file.problem for file in models.damaged()}
    assert "No such file" in hidden.pop(tmp_path / "nowhere")
    assert set(hidden) == {folder / "fox.gguf", foreign / "owner" / "repo" / "smol.gguf"}
    assert all("hidden" in problem for problem in hidden.values())


def test_copies_have_one_id_and_changed_ones_another(models: Store, folder: Path, tiny_gguf: Path) -> None:
    put(tiny_gguf, folder, "smol.gguf")
    for name in ("one", "two"):
        naming.copy(models, "smol", name)
    assert models.resolve("one").digest == models.resolve("two").digest
    os.utime(folder / "smol.gguf", (2_000_000, 2_000_000))
    changed = models.resolve("one").digest
    naming.copy(models, "smol", "three")
    assert models.resolve("three").digest == changed


def test_a_folder_of_the_setting_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    closed, file = tmp_path / "closed", tmp_path / "file"
    closed.mkdir()
    file.touch()
    store = Store(tmp_path / "models", model_dirs=[closed, file, tmp_path / "nowhere"])
    monkeypatch.setattr(os, "scandir", _refusing(os.scandir, closed))
    assert store.damaged() == [
        DamagedFile(closed, "the folder cannot be read: Permission denied"),
        DamagedFile(file, "the folder cannot be read: Not a directory"),
        DamagedFile(tmp_path / "nowhere", "the folder cannot be read: No such file or directory"),
    ]


@pytest.mark.parametrize(("n_beside", "is_told"), [(3, False), (4, True)])
def test_a_folder_with_more_than_is_looked_at_is_told(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, n_beside: int, is_told: bool
):
    monkeypatch.setattr(model_files, "MAX_ENTRIES", 5)
    own = tmp_path / "own" / "below"
    own.mkdir(parents=True)
    put(tiny_gguf, own, "a.gguf")
    for number in range(n_beside):
        (own / f"note-{number}").touch()
    store = Store(tmp_path / "models", model_dirs=[tmp_path / "own"])
    assert [model.name for model in store.list()][1:] == ["a"]
    assert [(file.path, "models may be missing" in file.problem) for file in store.damaged()] == (
        [(tmp_path / "own", True)] if is_told else []
    )


def test_folders_of_the_hub_s_cache_and_of_types_are_looked_into(tmp_path: Path, tiny_gguf: Path):
    cache, own = tmp_path / "hub", tmp_path / "own"
    snapshot = cache / "models--o--linked-GGUF" / "snapshots" / ("0" * 40)
    for place, name in ((snapshot / "Q8_0", "linked.gguf"), (own / "a" / "b" / "c" / "d", "deep.gguf")):
        place.mkdir(parents=True)
        put(tiny_gguf, place, name)
    (own / "a" / "again").symlink_to(own)
    store = Store(tmp_path / "models", model_dirs=[cache, own])
    assert [model.name for model in store.list()][1:] == ["deep", "linked"]
    assert store.damaged() == []


def _refusing(scandir: Any, folder: Path) -> Any:
    def refuse(path: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    return refuse
