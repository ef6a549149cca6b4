"""Which models are refused by what their headers say first, and that the list is the installed library's."""

from __future__ import annotations

import struct
from pathlib import Path

import llama_cpp
import pytest

from localrun.models.gguf import tables
from localrun.models.gguf.reader import first_entries, read_header
from tests.models.handmade import ENTRIES, STRING, U32, VALID, array, entry, file_bytes, text, u32
from tests.says import says


def test_the_list_is_for_the_version_that_is_installed():
    assert llama_cpp.__version__ == tables.LLAMA_CPP_PYTHON


def test_the_installed_library_knows_every_name_of_the_lists():
    folder = Path(llama_cpp.__file__).parent / "lib"
    libraries = [path.read_bytes() for path in folder.iterdir() if "llama" in path.name and path.is_file()]
    assert libraries, f"there is no library in {folder}"
    names = tables.LOADABLE | tables.PRE_TOKENIZERS
    missing = {name for name in names if not any(name.encode() + b"\0" in content for content in libraries)}
    assert missing == set()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt-oss", "qwen35moe", "mistral3", "bert"])
def test_what_can_be_loaded(architecture: str):
    assert tables.problem({"general.architecture": architecture}) == ""


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "gptoss"}, ["'gptoss'", "Ollama"]),
        ({"general.architecture": "future-1"}, ["'future-1'", "llama.cpp"]),
        ({"general.architecture": "x" * 200}, ["x" * 60 + "'"]),
        ({"general.architecture": "gemma3", "gemma3.vision.block_count": 27}, ["'gemma3'", "vision"]),
        ({"general.architecture": "llama", "tokenizer.ggml.model": "bytes9"}, ["the tokenizer 'bytes9'"]),
        (
            {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "zork"},
            ["the pre-tokenizer 'zork'"],
        ),
    ],
)
def test_what_cannot(metadata: dict[str, str | int], said: list[str]):
    problem = tables.problem(metadata)
    assert says(problem, *said)
    assert tables.LLAMA_CPP_PYTHON in problem


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": 7}, {"general.name": "gptoss"}])
def test_what_says_nothing_is_not_refused(metadata: dict[str, str | int]):
    assert tables.problem(metadata) == ""


def test_the_first_entries_of_a_file_that_is_cut_anywhere(tmp_path: Path):
    whole = first_entries(VALID)
    path = tmp_path / "model.gguf"
    path.write_bytes(VALID)
    assert whole == read_header(path).metadata
    counts = [len(first_entries(VALID[:n_bytes])) for n_bytes in range(len(VALID))]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(ENTRIES))


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"<html>", VALID[:4] + struct.pack("<I", 9) + VALID[8:], b"\xff" * 999]
)
def test_what_is_no_header_has_no_entries(content: bytes):
    assert first_entries(content) == {}


def test_entries_before_a_vocabulary_that_is_not_here_yet():
    vision = entry("gemma3.vision.block_count", U32, u32(27))
    tokens = array("tokenizer.ggml.tokens", STRING, 260_000, b"")
    content = file_bytes((entry("general.architecture", STRING, text("gemma3")), vision, tokens))
    assert first_entries(content) == {"general.architecture": "gemma3", "gemma3.vision.block_count": 27}
