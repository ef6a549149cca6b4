"""Estimates of memory from the header alone: for text, layer by layer, and for embeddings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from localrun.engine import backend, process
from localrun.engine.native.llama import BACKGROUND_SEQUENCES
from localrun.errors import BadRequest
from localrun.models.gguf.header import Header, TensorInfo, Value
from localrun.models.gguf.reader import read_header
from localrun.models.memory import (
    MAX_SEQUENCES,
    MOST_TOKENS,
    MOST_WHOLE_TOKENS,
    POOLED_SEQUENCES,
    SPARE_SEQUENCES,
    LayerMemory,
    MemoryEstimate,
    copied_output_bytes,
    embedding_estimate,
    estimate,
    model_memory,
    most_embedding_tokens,
    repacked_bytes,
)
from tests.models.gguf.test_header import of_kind as bare_header
from tests.models.synthesize_embedding import synthesize_embedding
from tests.support.synthesis.synthesize import synthesize


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
    output = TensorInfo("output.weight", (4096, 128_256), "Q6_K", 0, 430_940_160)
    header = dataclasses.replace(make_header(), tensors=(*make_header().tensors, output))
    assert estimate_8b(header).weights_bytes == 295_501_824 + 430_940_160


@pytest.mark.parametrize(
    ("machine", "type_name", "is_copied"),
    [("aarch64", "Q6_K", True), ("arm64", "Q8_0", True), ("x86_64", "Q6_K", False), ("x86_64", "Q4_0", True)],
)
def test_embeddings_that_are_the_output_too_are_loaded_once_more_for_quick_kernels(
    machine: str, type_name: str, is_copied: bool
) -> None:
    embedding = TensorInfo("token_embd.weight", (640, 262_144), type_name, 0, 137_625_600)
    tied = dataclasses.replace(make_header(), tensors=(embedding,))
    assert copied_output_bytes(tied, machine) == 137_625_600 * is_copied
    assert estimate_8b(tied).weights_bytes == 137_625_600 + copied_output_bytes(tied)
    on_gpu = estimate(tied, n_kv_cells=8192, n_slots=8, n_ubatch=512, kv_type="f16", is_on_gpu=True)
    assert on_gpu.weights_bytes == 137_625_600
    untied = dataclasses.replace(tied, tensors=(embedding, embedding._replace(name="output.weight")))
    assert copied_output_bytes(untied, machine) == 0
    assert copied_output_bytes(dataclasses.replace(tied, architecture="bert"), machine) == 0


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
    one, other = (estimate(make_header(), n_kv_cells=n, n_slots=1, n_ubatch=512, kv_type="f16") for n in (8193, 8448))
    assert one == other


def test_every_stream_has_whole_steps_of_cells() -> None:
    """And the pool beside them has as many."""
    assert estimate_8b(n_kv_cells=8193) == estimate_8b(n_kv_cells=8 * 1280)


@pytest.mark.parametrize(("n_kv_cells", "is_split"), [(8192, True), (8193, False)])
def test_a_model_that_computes_long_contexts_differently_has_no_streams_then(n_kv_cells: int, is_split: bool) -> None:
    header = make_header()
    factors = TensorInfo("rope_factors_long.weight", (64,), "F32", 0, 256)
    header = dataclasses.replace(
        header,
        metadata={**header.metadata, "llama.rope.scaling.original_context_length": 8192},
        tensors=(*header.tensors, factors),
    )
    assert (estimate_8b(header, n_kv_cells).staging_bytes > 0) == is_split


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
    assert (SPARE_SEQUENCES, MAX_SEQUENCES) == (process.SPARE_SEQUENCES, backend.MAX_SEQUENCES)
    assert POOLED_SEQUENCES == BACKGROUND_SEQUENCES


def test_long_prompts_in_the_background_have_cells_and_buffers_of_their_own(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    synthesize("tiny", "F16", path)
    header = read_header(path)
    one, eight = (estimate(header, n_kv_cells=4096, n_slots=n, n_ubatch=512, kv_type="f16") for n in (1, 8))
    assert one.staging_bytes == 0, "one slot has no background"
    assert eight.staging_bytes > eight.kv_bytes, "as many cells, and buffers"


def test_a_gpu_has_one_pool_and_no_background() -> None:
    one_pool = estimate(make_header(), n_kv_cells=8192, n_slots=8, n_ubatch=512, kv_type="f16", is_on_gpu=True)
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


ALL, WINDOW = LayerMemory(2, False, False), LayerMemory(2, True, False)
STATE, BOTH = LayerMemory(0, False, True), LayerMemory(2, False, True)


def header(architecture: str, n_layers: int = 6, **keys: Value) -> Header:
    metadata: dict[str, Value] = {
        "context_length": 8192, "block_count": n_layers, "embedding_length": 256, "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }  # fmt: skip
    metadata |= {key.replace("__", "."): value for key, value in keys.items()}
    named = {f"{architecture}.{key}": value for key, value in metadata.items()}
    return Header(
        path=Path("m.gguf"),
        size_bytes=0,
        version=3,
        architecture=architecture,
        metadata=named,
        tensors=(),
        data_offset=0,
    )


def layers(made: Header, n_kv_cells: int = 8192) -> tuple[LayerMemory, ...]:
    return model_memory(made, n_kv_cells=n_kv_cells).layers


def test_attention_keeps_everything_and_can_be_shared():
    memory = model_memory(header("llama"), n_kv_cells=8192)
    assert memory.layers == (ALL,) * 6
    assert memory.is_shareable
    assert (memory.n_window, memory.state_elements) == (0, 0)


@pytest.mark.parametrize(("architecture", "every"), [("gemma2", 2), ("gemma3", 6), ("gpt-oss", 2), ("cohere2", 4)])
def test_every_nth_layer_of_a_model_with_windows_sees_everything(architecture: str, every: int):
    memory = model_memory(header(architecture, attention__sliding_window=512), n_kv_cells=8192)
    assert memory.layers == tuple(ALL if (layer + 1) % every == 0 else WINDOW for layer in range(6))
    assert memory.n_window == 512
    assert not memory.is_shareable


def test_a_file_may_say_itself_which_layers_have_windows():
    pattern = {"attention__sliding_window": 512, "attention__sliding_window_pattern": (True, False, True) * 2}
    assert layers(header("new-one", **pattern)) == (WINDOW, ALL, WINDOW) * 2
    assert layers(header("gemma3", attention__sliding_window=512, attention__sliding_window_pattern=3)) == (
        WINDOW, WINDOW, ALL, WINDOW, WINDOW, ALL,
    )  # fmt: skip


def test_a_window_that_nothing_outgrows_is_none():
    made = header("gemma3", attention__sliding_window=4096)
    assert model_memory(made, n_kv_cells=4096).is_shareable
    assert layers(made, 4096) == (ALL,) * 6
    assert not model_memory(made, n_kv_cells=8192).is_shareable


def test_an_unknown_architecture_with_a_window_counts_as_one_that_keeps_everything():
    assert layers(header("new-one", attention__sliding_window=512)) == (ALL,) * 6


def test_recurrent_models_keep_a_state_a_layer_and_nothing_else():
    sizes: dict[str, Value] = {"ssm__conv_kernel": 4, "ssm__inner_size": 512, "ssm__state_size": 16}
    memory = model_memory(header("mamba", **sizes), n_kv_cells=8192)
    assert memory.layers == (STATE,) * 6
    assert memory.state_elements == 3 * 512 + 16 * 512
    assert not memory.is_shareable
    rwkv = model_memory(header("rwkv7", wkv__head_size=64, token_shift_count=2), n_kv_cells=8192)
    assert rwkv.state_elements == 256 * (2 + 64)


def test_hybrid_models_mark_their_layers_in_three_ways():
    by_heads: dict[str, Value] = {"attention.head_count_kv": (0, 0, 2, 0, 0, 2), "shortconv.l_cache": 3}
    lfm2 = model_memory(header("lfm2", **by_heads), n_kv_cells=8192)
    assert lfm2.layers == (STATE, STATE, ALL) * 2
    assert lfm2.state_elements == 2 * 256
    delta: dict[str, Value] = {
        "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 32, "ssm.group_count": 2,
    }  # fmt: skip
    qwen = model_memory(header("qwen35", 8, **delta), n_kv_cells=8192)
    assert qwen.layers == (STATE, STATE, STATE, ALL) * 2
    assert qwen.state_elements == 3 * (128 + 2 * 2 * 32) + 32 * 128
    assert layers(header("qwen35", full_attention_interval=3)) == (STATE, STATE, ALL) * 2
    assert layers(header("qwen35", nextn_predict_layers=1)) == (STATE, STATE, STATE, ALL, STATE, ALL)
    assert layers(header("falcon-h1")) == (BOTH,) * 6


def test_nonsense_in_a_file_is_no_size():
    assert layers(header("gemma3", attention__sliding_window=-1)) == (ALL,) * 6
    assert model_memory(header("mamba", ssm__inner_size=1 << 40), n_kv_cells=8192).state_elements == 0


# Prints the bytes that opening a model and computing one full step took.
PROBE = """
import sys
from localrun.engine.native.embedder import LlamaEmbedder
from localrun.wire import Pooling
import psutil
before = psutil.Process().memory_info().rss
path, pooling, n_ctx, n_rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
made = LlamaEmbedder(path, pooling=Pooling(pooling), n_ctx=n_ctx, n_rows=n_rows, n_threads=1)
count = made.n_rows if made.can_split else made.n_ctx
made.batch.token[:count] = 5
made.batch.pos[:count] = range(count)
made.batch.seq[:count] = 0
made.batch.wants_logits[:count] = 1
made.compute(count)
print(psutil.Process().memory_info().rss - before)
"""


def test_the_longest_input_follows_the_kind_and_the_file():
    assert most_embedding_tokens(bare_header("bert", context_length=512)) == 512
    assert most_embedding_tokens(bare_header("modern-bert", context_length=8192)) == MOST_WHOLE_TOKENS
    assert most_embedding_tokens(bare_header("qwen3", context_length=32_768)) == MOST_TOKENS
    assert most_embedding_tokens(bare_header("qwen3", context_length=32_768), 16_384) == 16_384
    assert most_embedding_tokens(bare_header("bert", context_length=512), 16_384) == 512


def test_an_encoder_has_no_kv_cache_and_a_decoder_one_for_an_input_and_a_step(tmp_path: Path):
    for kind in ("tiny-bert", "tiny-qwen3-embedding"):
        synthesize_embedding(kind, tmp_path / f"{kind}.gguf")
    encoder = embedding_estimate(read_header(tmp_path / "tiny-bert.gguf"), n_tokens=128, n_rows=512, kv_type="f16")
    decoder = embedding_estimate(
        read_header(tmp_path / "tiny-qwen3-embedding.gguf"), n_tokens=1024, n_rows=512, kv_type="f16"
    )
    assert encoder.kv_bytes == 0
    assert encoder.process_bytes > 0
    # Three layers, two heads of 16 numbers for keys and as many for values, two bytes each.
    assert decoder.kv_bytes == 3 * 2 * 16 * 2 * 2 * (1024 + 512)


@pytest.mark.parametrize(
    ("kind", "pooling", "n_tokens", "n_rows"),
    [("tiny-bert", "mean", 128, 2048), ("tiny-qwen3-embedding", "last", 2048, 2048)],
)
def test_the_estimate_is_about_what_a_full_step_takes(
    kind: str, pooling: str, n_tokens: int, n_rows: int, tmp_path: Path
):
    path = tmp_path / "model.gguf"
    synthesize_embedding(kind, path)
    arguments = [sys.executable, "-c", PROBE, str(path), pooling, str(n_tokens), str(n_rows)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    taken = int(run.stdout.split()[-1])
    needed = embedding_estimate(read_header(path), n_tokens=n_tokens, n_rows=n_rows, kv_type="f16")
    expected = needed.total_bytes - needed.process_bytes  # the process was there before
    mib = 1024 * 1024
    # The library's own structures come on top, and pages that nobody touched do not count.
    assert taken < expected + 24 * mib
    assert expected < 2 * taken + 24 * mib
