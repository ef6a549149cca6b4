"""The arithmetic of the memory estimate. That it is true of llama.cpp is tested in test_synthesize.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from localrun.engine import process
from localrun.errors import BadRequest
from localrun.models.gguf import read_header
from localrun.models.header import Header, TensorInfo, Value
from localrun.models.memory import MAX_SEQUENCES, SPARE_SEQUENCES, MemoryEstimate, estimate, repacked_bytes
from localrun.models.synthesize import synthesize


def make_header(**changed: Value) -> Header:
    """Llama-3.1-8B's dimensions, with one tensor."""
    metadata: dict[str, Value] = {
        "llama.context_length": 131_072,
        "llama.block_count": 32,
        "llama.embedding_length": 4096,
        "llama.feed_forward_length": 14_336,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.vocab_size": 128_256,
    } | {f"llama.attention.{key}": value for key, value in changed.items()}
    tensors = (TensorInfo("token_embd.weight", (4096, 128_256), "Q4_0", 0, 295_501_824),)
    path = Path("m.gguf")
    return Header(
        path=path, size_bytes=0, version=3, architecture="llama", metadata=metadata, tensors=tensors, data_offset=0
    )


def estimate_8b(header: Header | None = None, n_kv_cells: int = 8192, kv_type: str = "f16") -> MemoryEstimate:
    return estimate(header or make_header(), n_kv_cells=n_kv_cells, n_slots=8, n_ubatch=512, kv_type=kv_type)


def test_weights_are_the_tensors() -> None:
    assert estimate_8b().weights_bytes == 295_501_824


def test_a_gibibyte_of_cache_for_8192_tokens_of_an_8b_model() -> None:
    assert estimate_8b().kv_bytes == 1024**3


@pytest.mark.parametrize(("kv_type", "bits"), [("f16", 16), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_quantized_caches_are_smaller(kv_type: str, bits: float) -> None:
    assert estimate_8b(kv_type=kv_type).kv_bytes == 1024**3 * bits / 16


def test_only_layers_with_attention_have_a_cache() -> None:
    hybrid = make_header(head_count_kv=(8, *(0,) * 31))
    assert estimate_8b(hybrid).kv_bytes == estimate_8b().kv_bytes / 32


def test_keys_and_values_may_differ_in_width() -> None:
    wide_keys = make_header(key_length=192, value_length=128)
    assert estimate_8b(wide_keys).kv_bytes == estimate_8b().kv_bytes * 320 / 256


def test_cells_come_in_steps_of_256() -> None:
    assert estimate_8b(n_kv_cells=8193) == estimate_8b(n_kv_cells=8448)


def test_the_total_is_the_sum_and_grows_with_cells() -> None:
    small, large = estimate_8b(n_kv_cells=4096), estimate_8b(n_kv_cells=32_768)
    without_process = small.weights_bytes + small.kv_bytes + small.compute_bytes + small.staging_bytes
    assert small.total_bytes == without_process + small.process_bytes
    assert large.compute_bytes > small.compute_bytes
    assert large.total_bytes > small.total_bytes


def test_an_unknown_cache_type_is_refused() -> None:
    with pytest.raises(BadRequest, match="f16, q8_0, q4_0"):
        estimate_8b(kv_type="f32")


def test_the_engine_has_as_many_sequences_as_the_estimate_counts() -> None:
    assert (SPARE_SEQUENCES, MAX_SEQUENCES) == (process.SPARE_SEQUENCES, process.MAX_SEQUENCES)


def test_long_prompts_in_the_background_have_cells_and_buffers_of_their_own(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    synthesize("tiny", "F16", path)
    header = read_header(path)
    one, eight = (estimate(header, n_kv_cells=4096, n_slots=n, n_ubatch=512, kv_type="f16") for n in (1, 8))
    assert one.staging_bytes == 0, "one slot has no background"
    assert eight.staging_bytes > eight.kv_bytes // 2, "four of eight streams, and buffers"


def test_a_gpu_has_one_pool_and_no_background() -> None:
    one_pool = estimate(make_header(), n_kv_cells=8192, n_slots=8, n_ubatch=512, kv_type="f16", may_split=False)
    assert one_pool.staging_bytes == 0
    assert one_pool.total_bytes < estimate_8b().total_bytes
    assert one_pool.compute_bytes > estimate_8b().compute_bytes, "rows of logits for kept prefixes"


@pytest.mark.parametrize(
    ("machine", "type_name", "is_copied"),
    [
        ("x86_64", "Q4_0", True), ("AMD64", "Q4_K", True), ("x86_64", "Q8_0", False), ("arm64", "Q8_0", True),
        ("aarch64", "F16", False), ("riscv64", "Q4_0", False),
    ],
)  # fmt: skip
def test_weights_that_are_copied_at_load_are_resident_twice(machine: str, type_name: str, is_copied: bool) -> None:
    embedding = TensorInfo("token_embd.weight", (256, 800), type_name, 0, 100)
    norm = TensorInfo("blk.0.attn_norm.weight", (256,), "F32", 0, 1024)
    narrow = TensorInfo("blk.0.attn_k.weight", (256, 12), type_name, 0, 1000)
    matrix = TensorInfo("blk.0.attn_q.weight", (256, 16), type_name, 0, 7000)
    last = matrix._replace(name="blk.0.attn_output.weight", size_bytes=9000)
    header = dataclasses.replace(make_header(), tensors=(embedding, matrix, norm, narrow, last))
    assert repacked_bytes(header, machine) == 7000 * is_copied, "what lies at the end is unmapped"
    needed = estimate_8b(header)
    assert needed.resident_bytes == needed.total_bytes + repacked_bytes(header)
