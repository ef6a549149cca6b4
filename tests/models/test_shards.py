"""Models that are split over several files, as llama.cpp's own tool splits them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from localrun.errors import BadModelFile
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import MAX_TENSORS, Shard, later_shards, read_header, shard_of
from localrun.models.memory import estimate
from localrun.models.storage.model_files import ModelFiles
from tests.models.handmade import ENTRIES, STRING, TYPE_F32, U8, array, entry, file_bytes, tensor, text
from tests.says import says

U16, I32 = 2, 5
PROBE = Path(__file__).with_name("llama_probe.py")
N_SHARDS = 3
DATA = bytes(256)


def place(number: int, n_shards: int = N_SHARDS, n_tensors: int = N_SHARDS) -> tuple[bytes, ...]:
    return (
        entry("split.no", U16, struct.pack("<H", number)),
        entry("split.count", U16, struct.pack("<H", n_shards)),
        entry("split.tensors.count", I32, struct.pack("<i", n_tensors)),
    )


def shard(number: int, *more: bytes, n_shards: int = N_SHARDS, n_tensors: int = N_SHARDS, name: str = "") -> bytes:
    """One tensor of 256 bytes; only the first file says what the model is."""
    own = ENTRIES if number == 0 else ()
    tensors = (tensor(name or f"tensor-{number}", (64,), TYPE_F32, 0),)
    return file_bytes((*own, *place(number, n_shards, n_tensors), *more), tensors, data=DATA)


def write(folder: Path, shards: dict[int, bytes]) -> Path:
    for number, content in shards.items():
        (folder / f"model-{number + 1:05}-of-{N_SHARDS:05}.gguf").write_bytes(content)
    return folder / f"model-00001-of-{N_SHARDS:05}.gguf"


def whole(folder: Path) -> Path:
    return write(folder, {number: shard(number) for number in range(N_SHARDS)})


def refusal(path: Path) -> str:
    with pytest.raises(BadModelFile) as caught:
        read_header(path)
    return caught.value.message


def test_all_files_make_one_model(tmp_path: Path) -> None:
    path = whole(tmp_path)
    header = read_header(path)
    files = sorted(tmp_path.iterdir())
    assert list(header.shard_paths) == files
    assert header.size_bytes == sum(file.stat().st_size for file in files)
    assert [found.name for found in header.tensors] == ["tensor-0", "tensor-1", "tensor-2"]
    assert header.weights_bytes == 3 * 256
    assert header.n_params == 3 * 64
    assert (header.architecture, header.n_layers) == ("llama", 2)
    needed = estimate(header, n_kv_cells=256, n_slots=1, n_ubatch=512, kv_type="f16")
    assert needed.weights_bytes == 3 * 256


def test_offsets_count_from_each_file_of_its_own(tmp_path: Path) -> None:
    header = read_header(whole(tmp_path))
    for found, path in zip(header.tensors, header.shard_paths, strict=True):
        assert found.offset == path.stat().st_size - 256


def test_links_keep_the_names_that_the_others_are_found_by(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number in range(N_SHARDS):
        (tmp_path / "blobs" / f"{number}").write_bytes(shard(number))
        link = tmp_path / "snapshot" / f"model-{number + 1:05}-of-{N_SHARDS:05}.gguf"
        link.symlink_to(tmp_path / "blobs" / f"{number}")
    header = read_header(tmp_path / "snapshot" / "model-00001-of-00003.gguf")
    assert len(header.tensors) == 3
    assert {path.parent.name for path in header.shard_paths} == {"snapshot"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = whole(tmp_path)
    path.with_name("model-00002-of-00003.gguf").unlink()
    assert says(refusal(path), "model-00002-of-00003.gguf is missing")
    path.with_name("model-00003-of-00003.gguf").unlink()
    assert "model-00002-of-00003.gguf, model-00003-of-00003.gguf are missing" in refusal(path)


def test_files_that_come_and_go_are_noticed(tmp_path: Path) -> None:
    path = whole(tmp_path)
    files = ModelFiles()
    found = files.load(path)
    assert found is not None
    assert len(found.header.tensors) == N_SHARDS
    second = path.with_name("model-00002-of-00003.gguf")
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(BadModelFile, match="missing"):
        files.load(path)
    second.write_bytes(content)
    assert files.load(path) is not None


def test_a_later_file_names_the_first(tmp_path: Path) -> None:
    write(tmp_path, {1: file_bytes((*ENTRIES, *place(1)), (tensor("t", (64,), TYPE_F32, 0),), data=DATA)})
    message = refusal(tmp_path / "model-00002-of-00003.gguf")
    assert says(message, "2 of 3", "model-00001-of-00003.gguf")


def test_a_later_file_as_the_tool_writes_it_names_the_first(tmp_path: Path) -> None:
    path = whole(tmp_path)
    assert "2 of 3" in refusal(path.with_name("model-00002-of-00003.gguf"))


def test_a_truncated_later_file_is_refused_by_its_name(tmp_path: Path) -> None:
    path = whole(tmp_path)
    write(tmp_path, {2: shard(2)[:-1]})
    assert refusal(path).startswith("model-00003-of-00003.gguf is truncated")


def test_files_of_different_models_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {0: shard(0), 1: shard(1, name="tensor-0"), 2: shard(2)})
    assert "has the tensor 'tensor-0' twice" in refusal(path)
    write(tmp_path, {1: shard(2), 2: shard(2)})
    assert "2 of 3" in refusal(path)
    write(tmp_path, {0: shard(0, n_tensors=4), 1: shard(1), 2: shard(2)})
    assert "with 4 tensors, but they have 3" in refusal(path)


def test_a_model_of_too_many_files_is_refused_without_looking_for_them(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-65535.gguf"
    path.write_bytes(shard(0, n_shards=65_535))
    assert "the limit is 1000" in refusal(path)


def test_the_limits_are_for_all_files_together(tmp_path: Path) -> None:
    half = MAX_TENSORS // 2 + 1
    contents = {0: shard(0)}
    for number in (1, 2):
        many = tuple(tensor(f"{number}-{i}", (8,), TYPE_F32, 32 * i) for i in range(half))
        contents[number] = file_bytes(place(number), many, data=bytes(32 * half))
    path = write(tmp_path, contents)
    assert says(refusal(path), "model-00003-of-00003.gguf", "number of tensors")
    million = array("tokenizer.x", STRING, 1_200_000, text("") * 1_200_000)
    write(tmp_path, {1: shard(1, million), 2: shard(2, million)})
    assert "texts in its arrays" in refusal(path)


def test_one_file_that_says_so_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "any name.gguf"
    path.write_bytes(file_bytes((*ENTRIES, *place(0, 1, 2), entry("x", U8, b"\0"))))
    header: Header = read_header(path)
    assert header.shard_paths == ()


def split_copy(whole_path: Path, folder: Path) -> Path:
    """The model in several files, written by the `gguf` package."""
    reader = gguf.GGUFReader(whole_path)
    writer = gguf.GGUFWriter(folder / "copy.gguf", "llama", split_max_tensors=15)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for found in reader.tensors:
        writer.add_tensor(found.name, found.data, raw_dtype=found.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(folder.glob("copy-00001-of-*.gguf"))


def test_what_the_gguf_package_splits_is_read_and_runs_in_llama(tiny_gguf: Path, tmp_path: Path) -> None:
    path = split_copy(tiny_gguf, tmp_path)
    header, whole_header = read_header(path), read_header(tiny_gguf)
    assert len(header.shard_paths) > 1
    assert header.n_params == whole_header.n_params
    assert header.weights_bytes == whole_header.weights_bytes
    assert {found.name for found in header.tensors} == {found.name for found in whole_header.tensors}
    run = subprocess.run(
        [sys.executable, str(PROBE)],
        input=json.dumps([str(path), 256, 1, 256, 1, ["hello"]]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout)["n_params"] == header.n_params


@pytest.mark.parametrize("name", ["m-00001-of-00002.GGUF", "m-00001-OF-00002.gguf"])
def test_other_files_are_not_looked_for_by_a_name_that_llama_cpp_does_not_write(tmp_path: Path, name: str):
    assert shard_of(name) == Shard("m", 1, 2), "the hub's customs take any case"
    assert later_shards(tmp_path / name) == []
    assert [path.name for path in later_shards(tmp_path / "m-00001-of-00002.gguf")] == ["m-00002-of-00002.gguf"]
    assert shard_of("m-٠٠٠٠١-of-00002.gguf") is None
