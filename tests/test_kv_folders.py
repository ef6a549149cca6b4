"""The folder of saved state, as the daemon and the command line see it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localrun import kv_folders
from localrun.kv_folders import About

ABOUT = About(model="some", model_path="/models/some.gguf", build="b", created_at_s=1.0)
NAME = "0" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with two segments, a half one and a file of somebody else's."""
    made = tmp_path / "kv" / NAME
    made.mkdir(parents=True)
    kv_folders.write_about(made, ABOUT)
    for key, used_at_s in ((b"a" * 16, 100), (b"b" * 16, 200)):
        path = made / kv_folders.entry_name(key)
        path.write_bytes(b"12345")
        os.utime(path, (used_at_s, used_at_s))
    half = made / kv_folders.temporary_name(b"c" * 16)
    half.write_bytes(b"1")
    os.utime(half, (150, 150))
    (made / "README").write_text("mine")
    return made


def test_survey_counts_what_is_ours(folder):
    (folder.parent / "not-a-fingerprint").mkdir()
    (folder.parent / ("1" * 32)).symlink_to(folder)
    (found,) = kv_folders.survey(folder.parent)
    assert found.about == ABOUT
    assert (found.n_entries, found.size_bytes, found.used_at_s) == (2, 11, 200.0)
    assert {file.key for file in found.files} == {b"a" * 16, b"b" * 16, b"c" * 16}
    assert [file.writer_pid for file in found.files if file.key == b"c" * 16] == [os.getpid()]
    assert (found.model_name, found.owner) == ("some", "/models/some.gguf")
    assert found.is_of("some")
    assert found.is_of("/models/some.gguf")
    assert not found.is_of("other")
    assert found.is_abandoned


def test_no_folder_is_an_empty_survey(tmp_path):
    assert kv_folders.survey(tmp_path / "nowhere") == []


def test_clear_keeps_the_note_and_what_is_being_written(folder):
    assert kv_folders.clear(folder) == 10
    (found,) = kv_folders.survey(folder.parent)
    assert (found.n_entries, found.size_bytes, found.about) == (0, 1, ABOUT)


def test_remove_takes_all_but_what_is_not_ours(folder):
    assert kv_folders.remove(folder) == 11
    assert [path.name for path in folder.iterdir()] == ["README"]
    (folder / "README").unlink()
    assert kv_folders.remove(folder) == 0
    assert not folder.exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 1}', b"\xff\xfe", b"[" * 100_000])
def test_an_unreadable_note_is_none(folder, content):
    (folder / kv_folders.ABOUT_NAME).write_bytes(content)
    (found,) = kv_folders.survey(folder.parent)
    assert found.about is None
    assert (found.model_name, found.owner) == (NAME, NAME)
    assert found.is_abandoned


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_a_note_that_is_no_file_is_none(folder):
    note = folder / kv_folders.ABOUT_NAME
    note.rename(folder.parent / "elsewhere.json")
    note.symlink_to(folder.parent / "elsewhere.json")
    assert kv_folders.read_about(folder) is None
    note.unlink()
    os.mkfifo(note)
    assert kv_folders.read_about(folder) is None


def test_a_note_is_replaced_whole(folder):
    other = About(model="other", model_path="/o.gguf", build="b", created_at_s=2.0)
    kv_folders.write_about(folder, other)
    assert kv_folders.read_about(folder) == other
    assert not [path for path in folder.iterdir() if path.name.startswith("0" * 32)]
