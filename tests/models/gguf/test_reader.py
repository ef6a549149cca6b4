"""Headers that nobody would write by accident, and those that people do write."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun.errors import BadModelFile
from localrun.models.gguf.header import ArraySummary, Header
from localrun.models.gguf.reader import MAX_ENTRIES, MAX_TENSORS, read_header
from localrun.models.memory import estimate
from tests.depth import DEPTH
from tests.models.handmade import (
    ARRAY,
    DATA,
    ENTRIES,
    STRING,
    TENSORS,
    TYPE_F32,
    TYPE_Q4_0,
    TYPE_Q4_K,
    U8,
    U32,
    U64,
    VALID,
    array,
    entry,
    file_bytes,
    tensor,
    text,
    u32,
    u64,
)

FAULTS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "truncated"),
    "other magic": (file_bytes(magic=b"GGML"), "not a GGUF file"),
    "version 0": (file_bytes(version=u32(0)), "version 0"),
    "version 1": (file_bytes(version=u32(1)), "version 1"),
    "future version": (file_bytes(version=u32(4)), "version 4"),
    "byte-swapped": (file_bytes(version=struct.pack(">I", 3)), "byte-swapped"),
    "-1 entries": (file_bytes(n_entries=-1), "the number of metadata entries"),
    "-1 tensors": (file_bytes(n_tensors=-1), "the number of tensors"),
    "one entry too many": (file_bytes(n_entries=len(ENTRIES) + 1), "model.bin"),
    "one tensor too many": (file_bytes(n_tensors=len(TENSORS) + 1), "model.bin"),
    "too many entries": (file_bytes(n_entries=MAX_ENTRIES + 1), "limit"),
    "too many tensors": (file_bytes(n_tensors=MAX_TENSORS + 1), "limit"),
    "key of -1 bytes": (file_bytes((*ENTRIES, u64(-1) + b"key")), "a metadata key of"),
    "empty key": (file_bytes((*ENTRIES, entry("", U8, b"\0"))), "without a key"),
    "key that is not UTF-8": (file_bytes((*ENTRIES, entry(b"\xff\xfe", U8, b"\0"))), "not UTF-8"),
    "duplicate key": (file_bytes((*ENTRIES, ENTRIES[1])), "twice"),
    "unknown value type": (file_bytes((*ENTRIES, entry("key", 13, b"\0" * 8))), "unknown value type 13"),
    "unknown element type": (file_bytes((*ENTRIES, array("key", 99, 1, b"\0" * 8))), "unknown element type 99"),
    "nested array": (file_bytes((*ENTRIES, array("key", ARRAY, 1, u32(U8) + u64(0)))), "arrays inside the array"),
    "10,000 nested arrays": (file_bytes((*ENTRIES, entry("k", ARRAY, (u32(ARRAY) + u64(1)) * 10_000))), "inside the"),
    "text of 1 TB": (file_bytes((*ENTRIES, entry("key", STRING, u64(1 << 40)))), "truncated"),
    "text of -1 bytes": (file_bytes((*ENTRIES, entry("key", STRING, u64(-1)))), "truncated"),
    "array of 2^60 numbers": (file_bytes((*ENTRIES, array("key", U64, 1 << 60, b""))), "truncated"),
    "array of -1 numbers": (file_bytes((*ENTRIES, array("key", U64, -1, b""))), "truncated"),
    "array of 2^60 texts": (file_bytes((*ENTRIES, array("key", STRING, 1 << 60, b""))), "texts in its arrays"),
    "array of too few texts": (file_bytes((array("tokenizer.x", STRING, 9_999, text("a")),), ()), "truncated"),
    "token of 1 TB": (file_bytes((array("tokenizer.x", STRING, 2, u64(1 << 40)),), ()), "truncated"),
    "alignment 0": (file_bytes((*ENTRIES, entry("general.alignment", U32, u32(0)))), "alignment 0"),
    "alignment 13": (file_bytes((*ENTRIES, entry("general.alignment", U32, u32(13)))), "alignment 13"),
    "alignment as text": (file_bytes((*ENTRIES, entry("general.alignment", STRING, text("32")))), "alignment"),
    "no architecture": (file_bytes(ENTRIES[1:]), "architecture"),
    "a model of pictures": (
        file_bytes((entry("general.architecture", STRING, text("flux")),)),
        "has the architecture 'flux', which llama.cpp cannot load",
    ),
    "no layer count": (file_bytes((*ENTRIES[:2], *ENTRIES[3:])), "'llama.block_count' is missing"),
    "0 layers": (file_bytes((*ENTRIES[:2], entry("llama.block_count", U32, u32(0)), *ENTRIES[3:])), "block_count"),
    "-1 layers": (file_bytes((*ENTRIES[:2], entry("llama.block_count", U32, u32(-1)), *ENTRIES[3:])), "block_count"),
    "width as text": (
        file_bytes((*ENTRIES[:3], entry("llama.embedding_length", STRING, text("64")), *ENTRIES[4:])),
        "embedding_length",
    ),
    "fewer widths than layers": (
        file_bytes((*ENTRIES[:5], array("llama.feed_forward_length", U32, 1, u32(96)), *ENTRIES[6:])),
        "1 entries for 2 layers",
    ),
    "negative heads": (
        file_bytes((*ENTRIES[:4], entry("llama.attention.head_count", 5, u32(-4)), *ENTRIES[5:])),
        "head_count",
    ),
    "split under another name": (file_bytes((*ENTRIES, entry("split.count", U32, u32(3)))), "the first of 3 files"),
    "split number of 32 bits": (file_bytes((*ENTRIES, entry("split.no", U32, u32(0)))), "no 16-bit number"),
    "an adapter": (file_bytes((*ENTRIES, entry("general.type", STRING, text("adapter")))), "not a language model"),
    "tensor name of 64 bytes": (file_bytes(tensors=(tensor("n" * 64, (64, 4), TYPE_Q4_0, 0),)), "limit is 63"),
    "tensor name of -1 bytes": (file_bytes(tensors=(u64(-1) + b"name",)), "limit is 63"),
    "tensor twice": (file_bytes(tensors=(TENSORS[0], tensor("token_embd.weight", (64,), TYPE_F32, 160))), "twice"),
    "5 dimensions": (file_bytes(tensors=(tensor("t", (32, 1, 1, 1, 1), TYPE_F32, 0),)), "5 dimensions"),
    "-1 dimensions": (file_bytes(tensors=(text("t") + u32(-1),)), "dimensions"),
    "a dimension of 0": (file_bytes(tensors=(tensor("t", (64, 0), TYPE_F32, 0),)), "without elements"),
    "a dimension of -1": (file_bytes(tensors=(tensor("t", (-1,), TYPE_F32, 0),)), "truncated"),
    "elements beyond 2^64": (file_bytes(tensors=(tensor("t", (1 << 32,) * 4, TYPE_F32, 0),)), "truncated"),
    "elements that wrap to 0": (file_bytes(tensors=(tensor("t", (1 << 32, 1 << 32), TYPE_F32, 0),)), "truncated"),
    "unknown tensor type": (file_bytes(tensors=(tensor("t", (64,), 43, 0),)), "unknown type 43"),
    "removed tensor type": (file_bytes(tensors=(tensor("t", (64,), 4, 0),)), "unknown type 4"),
    "tensor type -1": (file_bytes(tensors=(tensor("t", (64,), -1, 0),)), "unknown type"),
    "row of part of a block": (file_bytes(tensors=(tensor("t", (64, 4), TYPE_Q4_K, 0),)), "multiple of 256"),
    "offset not at its place": (file_bytes(tensors=(TENSORS[0], tensor("n", (64,), TYPE_F32, 192))), "expected 160"),
    "offset beyond the file": (file_bytes(tensors=(tensor("t", (64,), TYPE_F32, 1 << 40),)), "expected 0"),
    "offset -1": (file_bytes(tensors=(tensor("t", (64,), TYPE_F32, -1),)), "expected 0"),
    "overlapping tensors": (file_bytes(tensors=(TENSORS[0], tensor("n", (64,), TYPE_F32, 0))), "expected 160"),
    "data one byte short": (VALID[:-1], "truncated"),
}  # fmt: skip


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[bytes], Header]:
    def write_and_read(content: bytes) -> Header:
        path = tmp_path / "model.bin"
        path.write_bytes(content)
        return read_header(path)

    return write_and_read


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_with_its_reason(fault: str, parse: Callable[[bytes], Header]) -> None:
    content, reason = FAULTS[fault]
    with pytest.raises(BadModelFile) as caught:
        parse(content)
    assert caught.value.message.startswith("model.bin ")
    assert reason in caught.value.message


def test_what_the_header_says(parse: Callable[[bytes], Header]) -> None:
    header = parse(VALID)
    assert (header.version, header.architecture, header.size_bytes) == (3, "llama", len(VALID))
    assert (header.n_ctx_train, header.n_layers, header.n_embd, header.n_vocab) == (4096, 2, 64, 3)
    assert header.metadata["llama.feed_forward_length"] == (96, 128)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArraySummary)
    assert (tokens.type, tokens.length) == ("str", 3)
    embedding, norm = header.tensors
    assert (embedding.name, embedding.shape, embedding.type_name) == ("token_embd.weight", (64, 4), "Q4_0")
    assert (embedding.offset, embedding.size_bytes) == (len(VALID) - len(DATA), 144)
    assert (norm.offset, norm.size_bytes) == (len(VALID) - 256, 256)
    assert header.control_tokens() == ("<s>",)


def test_version_2_is_read(parse: Callable[[bytes], Header]) -> None:
    assert parse(file_bytes(version=u32(2))).version == 2


def test_padding_after_the_last_tensor_may_be_missing(parse: Callable[[bytes], Header]) -> None:
    content = file_bytes(tensors=TENSORS[:1], data=bytes(144))
    assert parse(content).tensors[0].size_bytes == 144


def test_a_tensor_without_dimensions_is_one_number(parse: Callable[[bytes], Header]) -> None:
    header = parse(file_bytes(tensors=(tensor("scale", (), TYPE_F32, 0),)))
    assert (header.tensors[0].shape, header.n_params) == ((1,), 1)


def test_an_odd_alignment_that_is_a_power_of_two_moves_the_data(parse: Callable[[bytes], Header]) -> None:
    entries = (*ENTRIES, entry("general.alignment", U32, u32(1024)))
    header = parse(file_bytes(entries, TENSORS[:1], alignment=1024, data=bytes(1024)))
    assert header.tensors[0].offset % 1024 == 0


def test_a_long_text_stays_in_the_file(parse: Callable[[bytes], Header]) -> None:
    long_text = "x" * (1024 * 1024 + 1)
    value = parse(file_bytes((*ENTRIES, entry("some.text", STRING, text(long_text))))).metadata["some.text"]
    assert isinstance(value, ArraySummary)
    assert (value.type, value.length) == ("u8", len(long_text))


def test_text_that_is_not_utf8_is_shown_with_marks(parse: Callable[[bytes], Header]) -> None:
    assert parse(file_bytes((*ENTRIES, entry("general.name", STRING, text(b"a\xffb"))))).name == "a\ufffdb"


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(VALID)
    for n_bytes in range(len(VALID) - 1, -1, -1):
        os.truncate(path, n_bytes)
        with pytest.raises(BadModelFile):
            read_header(path)


def test_a_real_file_cut_at_any_page_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    for n_bytes in range(len(whole) // 4096 * 4096, -1, -4096):
        os.truncate(path, n_bytes)
        with pytest.raises(BadModelFile, match="truncated"):
            read_header(path)


def test_what_is_not_a_regular_file_is_refused_unread(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(BadModelFile, match="not a regular file"):
            read_header(path)
    with pytest.raises(BadModelFile, match="No such file"):
        read_header(tmp_path / "nowhere.gguf")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_a_fifo_without_a_writer_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BadModelFile, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


def test_files_of_the_gguf_package_are_read(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_array("some.flags", [True, False])
    writer.add_array("some.words", ["é", ""])
    writer.add_float64("some.double", 0.5)
    writer.add_int8("some.small", -3)
    writer.add_uint64("some.large", 1 << 63)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_types([3, 1, 3])
    weights = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("token_embd.weight", weights)
    writer.add_tensor("half", weights.astype(np.float16))
    quantized = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("eight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)
    metadata = header.metadata
    assert (metadata["some.flags"], metadata["some.words"]) == ((True, False), ("é", ""))
    assert (metadata["some.double"], metadata["some.small"], metadata["some.large"]) == (0.5, -3, 1 << 63)
    assert header.control_tokens() == ("a", "c")
    content = path.read_bytes()
    whole, half, eight = header.tensors
    assert content[whole.offset : whole.offset + whole.size_bytes] == weights.tobytes()
    assert content[half.offset : half.offset + half.size_bytes] == weights.astype(np.float16).tobytes()
    assert content[eight.offset : eight.offset + eight.size_bytes] == quantized.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_for_big_endian_machines_is_refused_with_the_way_out(version: int, tmp_path: Path) -> None:
    path = tmp_path / "swapped.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_context_length(2048)
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack(">I", version)
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match=r"big-endian"):
        read_header(path)


@pytest.fixture(scope="module")
def real_head(tiny_gguf: Path) -> bytes:
    """The header of a model with a vocabulary, and nothing behind it."""
    return tiny_gguf.read_bytes()[: read_header(tiny_gguf).data_offset]


@settings(max_examples=60 * DEPTH, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_real_header_with_anything_changed_is_read_or_refused_within_its_memory(
    data: st.DataObject, real_head: bytes, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes overwritten with numbers that break parsers, pieces cut out or repeated; the file keeps its real size."""
    head = bytearray(real_head)
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        start = data.draw(st.integers(0, len(head) - 9) | st.integers(0, 700), label="start")
        match data.draw(st.sampled_from(("overwrite", "cut", "repeat")), label="change"):
            case "overwrite":
                value = data.draw(
                    st.sampled_from((0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1, 8, 9)), label="value"
                )
                head[start : start + 8] = struct.pack("<Q", value)
            case "cut":
                del head[start : start + data.draw(st.integers(1, 40), label="length")]
            case _:
                piece = head[start : start + data.draw(st.integers(1, 200), label="length")]
                head[start:start] = piece
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(head)
    os.truncate(path, tiny_gguf.stat().st_size)
    tracemalloc.start()
    try:
        header = read_header(path)
        header.control_tokens()
        assert header.weights_bytes <= header.size_bytes
        assert all(0 < t.offset <= t.offset + t.size_bytes <= header.size_bytes for t in header.tensors)
        estimate(header, n_kv_cells=4096, n_slots=8, n_ubatch=512, kv_type="f16")
    except BadModelFile:
        pass
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 64 * 1024 * 1024


flips = st.lists(st.tuples(st.integers(0, len(VALID) - len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=6)


@settings(max_examples=150 * DEPTH)
@given(flips=flips)
def test_a_header_with_flipped_bytes_is_read_or_refused(
    flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(VALID)
    for position, byte in flips:
        content[position] = byte
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    try:
        header = read_header(path)
        header.control_tokens()
    except BadModelFile:
        return
    assert isinstance(header.quantization, str)
    needed = estimate(header, n_kv_cells=4096, n_slots=8, n_ubatch=512, kv_type="f16")
    assert needed.total_bytes >= needed.weights_bytes >= 0


def test_a_pointer_of_git_lfs_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456789\n" * 3)
    with pytest.raises(BadModelFile, match="is a pointer of Git LFS"):
        read_header(path)
    path.write_text("<!doctype html><html><title>Foo-Q4_0.gguf</title></html>" * 9)
    with pytest.raises(BadModelFile, match="is a web page"):
        read_header(path)
