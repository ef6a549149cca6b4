"""What headers say: dimensions, quantization, and the texts of tokens, read from the file again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localrun.errors import BadModelFile
from localrun.models.gguf import header
from localrun.models.gguf.header import (
    ArraySummary,
    Header,
    TensorInfo,
    Value,
    dimension_problem,
    read_token,
    special_token_text,
)
from localrun.models.gguf.reader import read_header

DIMENSIONS: dict[str, Value] = {
    "llama.context_length": 8192,
    "llama.block_count": 3,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.feed_forward_length": 1536,
}


def make_header(tensors: tuple[TensorInfo, ...] = (), **changed: Value) -> Header:
    metadata = DIMENSIONS | {key.replace("__", "."): value for key, value in changed.items()}
    path = Path("/models/some-model-Q4_0.gguf")
    return Header(
        path=path, size_bytes=0, version=3, architecture="llama", metadata=metadata, tensors=tensors, data_offset=0
    )


def test_dimensions_of_a_plain_model() -> None:
    header = make_header()
    assert (header.n_layers, header.n_embd, header.n_heads, header.n_heads_kv, header.n_ff) == (3, 576, 9, 3, 1536)
    assert (header.head_dim_k, header.head_dim_v) == (64, 64)
    assert header.heads_kv_per_layer == (3, 3, 3)


def test_head_dimensions_that_the_file_states_win() -> None:
    header = make_header(llama__attention__key_length=128, llama__attention__value_length=96)
    assert (header.head_dim_k, header.head_dim_v) == (128, 96)


def test_layers_without_attention_have_no_heads() -> None:
    header = make_header(llama__attention__head_count_kv=(0, 4, 0))
    assert header.heads_kv_per_layer == (0, 4, 0)
    assert header.n_heads_kv == 4


def test_key_heads_default_to_query_heads() -> None:
    header = make_header()
    del header.metadata["llama.attention.head_count_kv"]
    assert header.heads_kv_per_layer == (9, 9, 9)


def test_a_model_without_attention() -> None:
    header = make_header(llama__attention__head_count=0, llama__attention__head_count_kv=0)
    assert (header.n_heads, header.n_heads_kv, header.head_dim_k) == (0, 0, 0)


def test_the_name_falls_back_to_the_file() -> None:
    assert make_header().name == "some-model-Q4_0"
    assert make_header(general__name="Some Model").name == "Some Model"


def test_parameters_and_bytes_are_sums_over_tensors() -> None:
    header = make_header((TensorInfo("a", (64, 4), "Q4_0", 0, 144), TensorInfo("b", (64,), "F32", 160, 256)))
    assert (header.n_params, header.weights_bytes) == (320, 400)


@pytest.mark.parametrize(
    ("file_type", "label"),
    [(1, "F16"), (2, "Q4_0"), (7, "Q8_0"), (15, "Q4_K_M"), (1024 + 7, "Q8_0"), (999, "Q6_K"), ("Q4_0", "Q6_K")],
)
def test_quantization_is_the_stated_file_type_or_the_commonest(file_type: Value, label: str) -> None:
    tensors = (TensorInfo("a", (256, 4), "Q6_K", 0, 840), TensorInfo("b", (64,), "F32", 864, 256))
    assert make_header(tensors, general__file_type=file_type).quantization == label


def test_quantization_of_a_file_without_tensors_is_unknown() -> None:
    assert make_header().quantization == "unknown"


def test_a_template_that_is_empty_or_no_text_counts_as_none() -> None:
    assert make_header(tokenizer__chat_template="{{ x }}").chat_template == "{{ x }}"
    assert make_header(tokenizer__chat_template="").chat_template is None
    assert make_header(tokenizer__chat_template="chatml").chat_template is None, "a name is no template"
    assert make_header(tokenizer__chat_template=7).chat_template is None
    assert make_header().chat_template is None


def test_a_template_for_tools_may_stand_apart() -> None:
    header = make_header(tokenizer__chat_template__tool_use="{{ tools }}")
    assert (header.tool_template, header.chat_template) == ("{{ tools }}", None)
    assert make_header(tokenizer__chat_template="{{ x }}").tool_template is None


def test_vocabulary_size_is_the_number_of_tokens_before_what_is_stated() -> None:
    stated = make_header(llama__vocab_size=100)
    assert stated.n_vocab == 100
    listed = make_header(llama__vocab_size=100, tokenizer__ggml__tokens=ArraySummary("str", 90, 0))
    assert listed.n_vocab == 90


def test_control_tokens_of_a_file_without_token_types() -> None:
    assert make_header(tokenizer__ggml__tokens=ArraySummary("str", 90, 0)).control_tokens() == ()


def test_control_tokens_of_a_file_that_was_cut_meanwhile(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    header = read_header(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(BadModelFile, match=r"model\.gguf is truncated"):
        header.control_tokens()
    path.unlink()
    with pytest.raises(BadModelFile, match="No such file"):
        header.control_tokens()


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("llama.context_length", 0, "'llama.context_length' is 0"),
        ("llama.context_length", 1 << 31, "not a number from 1 to 2147483647"),
        ("llama.context_length", True, "'llama.context_length' is True"),
        ("llama.block_count", 513, "not a number from 1 to 512"),
        ("llama.embedding_length", (1, 2), "'llama.embedding_length' is (1, 2)"),
        ("llama.attention.key_length", -1, "'llama.attention.key_length' is -1"),
        ("llama.rope.dimension_count", (1 << 32) - 32, "not a number up to"),
        ("llama.attention.head_count_kv", (1, 2), "has 2 entries for 3 layers"),
        ("llama.attention.head_count", (1, 2, "3"), "not numbers up to"),
        ("llama.feed_forward_length", ArraySummary("u32", 5000, 0), "not numbers up to"),
        ("llama.feed_forward_length", 1.5, "not numbers up to"),
    ],
)
def test_impossible_dimensions_are_named(key: str, value: Value, problem: str) -> None:
    assert problem in (dimension_problem("llama", DIMENSIONS | {key: value}) or "")


def test_possible_dimensions_are_no_problem() -> None:
    assert dimension_problem("llama", DIMENSIONS) is None
    assert dimension_problem("llama", DIMENSIONS | {"llama.attention.head_count_kv": (0, 2, 0)}) is None


def test_tokens_by_id(tiny_gguf: Path) -> None:
    header = read_header(tiny_gguf)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArraySummary)
    assert [read_token(tiny_gguf, tokens, index) for index in (0, 2, 3, 258, 259)] == [
        "<|endoftext|>", "<|im_end|>", "Ā", "ÿ", "Ġt",
    ]  # fmt: skip
    assert read_token(tiny_gguf, tokens, tokens.length - 1).startswith("Ġ")


def test_special_tokens_by_role(tiny_gguf: Path) -> None:
    header = read_header(tiny_gguf)
    assert special_token_text(header, "tokenizer.ggml.eos_token_id") == "<|im_end|>"
    assert special_token_text(header, "tokenizer.ggml.bos_token_id") == "<|endoftext|>"
    assert special_token_text(header, "tokenizer.ggml.unknown_token_id") == ""
    header.metadata["tokenizer.ggml.unknown_token_id"] = 1 << 40
    assert special_token_text(header, "tokenizer.ggml.unknown_token_id") == ""


def test_control_tokens_in_id_order(tiny_gguf: Path) -> None:
    assert read_header(tiny_gguf).control_tokens() == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("limit", ["MAX_CONTROL_TOKENS", "MAX_TOKEN_BYTES"])
def test_beyond_a_limit(limit: str, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, limit, 2)
    with pytest.raises(BadModelFile, match="the limit is 2"):
        read_header(tiny_gguf).control_tokens()


EOS = "tokenizer.ggml.eos_token_id"
BOS = "tokenizer.ggml.bos_token_id"
WORDS = [f"word{number}" for number in range(2000)]


def write(path: Path, *, eos: int | None, tokens: list[str] = WORDS) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_token_list(tokens)
    if eos is not None:
        writer.add_uint32(EOS, eos)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("eos", [0, 1, 1234, 1999])
def test_the_text_of_a_token(tmp_path: Path, eos: int) -> None:
    assert special_token_text(read_header(write(tmp_path / "m.gguf", eos=eos)), EOS) == f"word{eos}"


@pytest.mark.parametrize("eos", [None, 2000, 2**31])
def test_no_such_token_is_no_text(tmp_path: Path, eos: int | None) -> None:
    header = read_header(write(tmp_path / "m.gguf", eos=eos))
    assert special_token_text(header, EOS) == ""
    assert special_token_text(header, BOS) == ""


def test_an_endless_text_is_refused(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m.gguf", eos=1, tokens=["a", "x" * 5000]))
    with pytest.raises(BadModelFile, match="5000 bytes"):
        special_token_text(header, EOS)


def test_a_file_that_is_gone_or_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", eos=1999)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(BadModelFile):
        special_token_text(header, EOS)
    path.unlink()
    with pytest.raises(BadModelFile):
        special_token_text(header, EOS)


def of_kind(architecture: str, **metadata: Any) -> Header:
    values = {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return Header(
        path=Path("model.gguf"), size_bytes=0, version=3, architecture=architecture, metadata=values, tensors=(),
        data_offset=0,
    )  # fmt: skip


@pytest.mark.parametrize(("number", "name"), [(1, "mean"), (2, "cls"), (3, "last"), (4, "rank")])
def test_a_stated_pooling_counts_whatever_the_architecture(number: int, name: str):
    for architecture in ("bert", "qwen3"):
        assert of_kind(architecture, pooling_type=number).pooling == name


@pytest.mark.parametrize("stated", [{}, {"pooling_type": 0}])
def test_without_one_encoders_take_the_mean_and_decoders_the_last_token(stated: dict[str, int]):
    assert of_kind("bert", **stated).pooling == "mean"
    assert of_kind("llama", attention__causal=False, **stated).pooling == "mean"
    assert of_kind("llama", **stated).pooling == "last"


def test_what_generates():
    assert of_kind("llama").generates
    assert of_kind("qwen3", pooling_type=0).generates
    assert not of_kind("qwen3", pooling_type=3).generates
    assert not of_kind("modern-bert").generates
    assert not of_kind("llama", attention__causal=False).generates
