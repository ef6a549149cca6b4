"""The fingerprint changes with whatever changes the meaning of a state, and with nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from localrun.engine.cache import disk_files as kv_fingerprint
from localrun.engine.cache.disk_files import HEAD_BYTES, fingerprint, library_build

SIZE_BYTES = 3 * HEAD_BYTES
PARAMETERS = {"kv_type": "f16", "memory": "attention"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * (SIZE_BYTES // 256))
    os.utime(path, (1000, 1000))
    return path


def of(model: Path, *, build: str = "build", **parameters: str) -> bytes:
    return fingerprint([model], build=build, parameters=PARAMETERS | parameters)


def test_the_same_file_has_the_same_by_whatever_name(model, tmp_path):
    (tmp_path / "link.gguf").symlink_to(model)
    assert of(tmp_path / "link.gguf") == of(model)
    assert len(of(model)) == 16


def test_every_shard_counts(model, tmp_path):
    second = tmp_path / "second.gguf"
    shutil.copy2(model, second)
    files = [model, second]
    before = fingerprint(files, build="b", parameters={})
    second.rename(tmp_path / "old.gguf")
    shutil.copy2(model, second)
    assert fingerprint(files, build="b", parameters={}) != before


def test_build_and_parameters_count(model):
    prints = [of(model), of(model, build="other"), of(model, kv_type="q8_0"), of(model, memory="window")]
    prints.append(of(model, extra="x"))
    assert len(set(prints)) == len(prints)
    assert fingerprint([model], build="a", parameters={"b": "cd"}) != fingerprint(
        [model], build="a", parameters={"bc": "d"}
    )


def test_size_time_and_contents_count(model):
    before = of(model)
    os.utime(model, (1000, 1001))
    assert of(model) != before
    page_step_bytes = (SIZE_BYTES - HEAD_BYTES) // kv_fingerprint.N_PAGES
    for offset in (0, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 5 * page_step_bytes + 17):
        with model.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff\xfe")
        os.utime(model, (1000, 1000))
        assert of(model) != before
        before = of(model)


def test_small_files_and_missing_ones(tmp_path):
    small = tmp_path / "small.gguf"
    small.write_bytes(b"")
    empty = of(small)
    small.write_bytes(b"x")
    assert of(small) != empty
    with pytest.raises(FileNotFoundError):
        of(tmp_path / "nowhere.gguf")


def test_a_rebuilt_library_is_another_build(tmp_path):
    library = tmp_path / "liba.so"
    library.write_bytes(b"code")
    os.utime(library, (1, 1))
    before = library_build("msgspec", tmp_path)
    assert before.startswith("msgspec 0.")
    assert library_build("msgspec", tmp_path) == before
    os.utime(library, (2, 2))
    assert library_build("msgspec", tmp_path) != before
    assert "unknown version" in library_build("no-such-package-anywhere", tmp_path)
