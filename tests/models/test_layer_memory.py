"""What each layer keeps, by the rules of each architecture. That it is true of llama.cpp: see test_synthesize.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.models.header import Header, Value
from localrun.models.memory import LayerMemory, model_memory

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
    assert layers(header("falcon-h1")) == (BOTH,) * 6


def test_nonsense_in_a_file_is_no_size():
    assert layers(header("gemma3", attention__sliding_window=-1)) == (ALL,) * 6
    assert model_memory(header("mamba", ssm__inner_size=1 << 40), n_kv_cells=8192).state_elements == 0
