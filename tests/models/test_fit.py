"""How a model is opened on a machine, and what is known of that before its file is here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.models.fit import (
    AUTO,
    CELL_STEP,
    DEFAULT_POOL_CELLS,
    FLOOR_CELLS,
    ROUGH_CELLS,
    Fit,
    FitRequest,
    Gpu,
    Machine,
    choose,
    gpu_share,
    layer_weights,
    rough_bytes,
    wanted_cells,
)
from localrun.models.gguf.header import Header, TensorInfo, Value
from localrun.models.memory import estimate
from tests.depth import DEPTH
from tests.projector_file import parts_of

weights_sizes = st.integers(0, 1000 * 1024**3)


def test_it_is_within_a_third_of_the_estimate_for_a_common_model() -> None:
    needed = estimate(HEADER, n_kv_cells=ROUGH_CELLS, n_slots=1, n_ubatch=512, kv_type="f16")
    assert rough_bytes(HEADER.weights_bytes) == pytest.approx(needed.total_bytes, rel=1 / 3)


@given(weights=weights_sizes, more=weights_sizes)
def test_larger_models_take_more(weights: int, more: int) -> None:
    assert weights < rough_bytes(weights) <= rough_bytes(weights + more)


GIB = 1024**3
LAYER_BYTES, OUTPUT_BYTES, EMBEDDING_BYTES = 130_000_000, 430_000_000, 295_000_000
N_LAYERS = 32


def make_header(*, tied: bool = False, **changed: Value) -> Header:
    """About Llama-3.1-8B in Q4_0: 32 layers, 4.9 GB."""
    metadata: dict[str, Value] = {
        "llama.context_length": 131_072,
        "llama.block_count": N_LAYERS,
        "llama.embedding_length": 4096,
        "llama.feed_forward_length": 14_336,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.vocab_size": 128_256,
    } | {f"llama.{key}": value for key, value in changed.items()}
    tensors = [TensorInfo("token_embd.weight", (4096, 128_256), "Q4_0", 0, EMBEDDING_BYTES)]
    if not tied:
        tensors.append(TensorInfo("output.weight", (4096, 128_256), "Q6_K", 0, OUTPUT_BYTES))
    tensors.append(TensorInfo("output_norm.weight", (4096,), "F32", 0, 4 * 4096))
    tensors += [
        TensorInfo(f"blk.{layer}.ffn_up.weight", (4096, 14_336), "Q4_0", 0, LAYER_BYTES) for layer in range(N_LAYERS)
    ]
    return Header(
        path=Path("m.gguf"), size_bytes=0, version=3, architecture="llama", metadata=metadata, tensors=tuple(tensors),
        data_offset=0,
    )  # fmt: skip


def make_projector() -> Header:
    """About that of a small model: 12 layers, 200 MB."""
    parts = parts_of("gemma3", 4096, n_embd=768, n_ff=3072, n_layers=12, n_heads=12, patch=16, image=512)
    return Header(
        path=Path("mmproj.gguf"), size_bytes=0, version=3, architecture="clip", metadata=dict(parts.entries),
        tensors=(TensorInfo("v.all.weight", (100_000_000,), "F16", 0, 200_000_000),), data_offset=0,
    )  # fmt: skip


HEADER = make_header()
sizes = st.integers(0, 64 * GIB)
gpus = st.lists(st.builds(Gpu, st.just("GPU"), sizes, st.booleans()), max_size=3).map(tuple)
machines = st.builds(Machine, sizes, gpus)
wishes = st.builds(
    FitRequest,
    n_slots=st.integers(1, 32),
    n_kv_cells=st.sampled_from([0, 1, 4096, 100_000]),
    kv_type=st.sampled_from([AUTO, "f16", "q8_0", "q4_0"]),
    n_gpu_layers=st.sampled_from([-1, -1, 0, 7, 99]),
    n_ubatch=st.sampled_from([32, 512, 2048]),
    projector=st.sampled_from([None, make_projector()]),
    draft=st.sampled_from([None, make_header(block_count=2)]),
    n_ctx=st.sampled_from([0, 0, 5_000, 131_072, 200_000]),
    n_roomy_cells=st.sampled_from([0, 0, 70_000]),
)


def on(ram_gib: float, *gpu_gib: float, shared: bool = False, **wish: Any) -> Fit:
    machine = Machine(int(ram_gib * GIB), tuple(Gpu("GPU", int(gib * GIB), shared) for gib in gpu_gib))
    return choose(HEADER, machine, FitRequest(**{"n_slots": 8, **wish}))


@settings(max_examples=50 * DEPTH)
@given(machine=machines, wish=wishes)
def test_what_is_chosen_fits_every_device_and_is_what_was_asked_for(machine: Machine, wish: FitRequest) -> None:
    fit = choose(HEADER, machine, wish)
    if fit.fits:
        assert all(use.total_bytes <= use.usable_bytes <= max(0, use.free_bytes) for use in fit.devices)
    assert 1 <= fit.n_slots <= wish.n_slots
    step = CELL_STEP if fit.n_gpu_layers else CELL_STEP * fit.n_slots  # on a CPU every slot has a stream of its own
    assert fit.n_kv_cells % step == 0
    least = max(wish.n_ctx, wish.n_kv_cells or FLOOR_CELLS)
    most = max(wish.n_ctx, wish.n_kv_cells or DEFAULT_POOL_CELLS, wish.n_roomy_cells)
    assert least <= fit.n_kv_cells < most + step
    assert fit.n_ctx == min(fit.n_kv_cells, max(HEADER.n_ctx_train, wish.n_ctx))
    assert fit.kv_type in ({"f16", "q8_0"} if wish.kv_type == AUTO else {wish.kv_type})
    if wish.n_gpu_layers >= 0 and machine.gpus:
        assert fit.n_gpu_layers == min(wish.n_gpu_layers, N_LAYERS + 1)
    if not machine.gpus:
        assert fit.n_gpu_layers == 0


@settings(max_examples=40 * DEPTH)
@given(machine=machines, wish=wishes)
def test_nothing_is_lost_between_the_devices(machine: Machine, wish: FitRequest) -> None:
    fit = choose(HEADER, machine, wish)
    assert sum(use.n_layers for use in fit.devices) == N_LAYERS + 1
    assert sum(use.n_layers for use in fit.devices[1:]) == fit.n_gpu_layers
    assert sum(use.weights_bytes for use in fit.devices) == HEADER.weights_bytes
    assert sum(use.kv_bytes for use in fit.devices) == fit.estimate.kv_bytes
    n_holders = 1 + sum(use.n_layers > 0 for use in fit.devices[1:])
    other_bytes = fit.estimate.process_bytes + fit.estimate.staging_bytes + n_holders * wish.adapter_bytes
    other_bytes += fit.estimate.draft_bytes + fit.estimate.projector_bytes
    assert (fit.estimate.projector_bytes > 200_000_000) == (wish.projector is not None)
    assert sum(use.other_bytes for use in fit.devices) == other_bytes
    for use in fit.devices[1:]:
        assert (use.compute_bytes > 0) == (use.n_layers > 0)


@settings(max_examples=40 * DEPTH)
@given(ram=sizes, more=sizes, n_slots=st.integers(1, 16))
def test_more_memory_never_stops_a_model_from_fitting(ram: int, more: int, n_slots: int) -> None:
    small, large = (choose(HEADER, Machine(size), FitRequest(n_slots)) for size in (ram, ram + more))
    assert large.fits or not small.fits
    if small.fits:
        assert large.n_slots >= small.n_slots
        assert (large.kv_type == "f16") >= (small.kv_type == "f16")


@settings(max_examples=30 * DEPTH)
@given(ram=sizes, gpu=sizes, more=sizes)
def test_a_larger_gpu_takes_as_many_layers_or_more(ram: int, gpu: int, more: int) -> None:
    wish = FitRequest(8, 8192, "f16")
    small, large = (choose(HEADER, Machine(ram, (Gpu("GPU", size),)), wish) for size in (gpu, gpu + more))
    if small.fits:
        assert large.n_gpu_layers >= small.n_gpu_layers


def test_a_large_machine_gives_all_that_is_wished_for() -> None:
    fit = on(64)
    assert (fit.fits, fit.n_slots, fit.n_kv_cells, fit.kv_type, fit.n_gpu_layers) == (True, 8, 32_768, "f16", 0)
    assert fit.estimate == estimate(HEADER, n_kv_cells=32_768, n_slots=8, n_ubatch=512, kv_type="f16")
    assert "32768 KV cells of the 131072" in fit.notes[0]


def test_memory_runs_out_in_the_order_of_the_rule() -> None:
    steps = []
    for ram_gib in range(30, 0, -1):
        fit = on(ram_gib / 2 + 4)
        step = (fit.n_slots, fit.n_kv_cells, fit.kv_type) if fit.fits else None
        if not steps or steps[-1] != step:
            steps.append(step)
    assert steps[0] == (8, 32_768, "f16")
    assert (8, 16_384, "f16") in steps
    assert (8, 8192, "f16") in steps
    assert steps.index((8, 8192, "f16")) < steps.index((8, 8192, "q8_0"))
    assert steps[-1] is None


def test_a_gpu_that_holds_it_all_gets_it_all() -> None:
    fit = on(8, 24)
    assert (fit.fits, fit.n_gpu_layers, fit.kv_type) == (True, N_LAYERS + 1, "f16")
    ram, gpu = fit.devices
    assert ram.weights_bytes == EMBEDDING_BYTES
    assert gpu.kv_bytes == fit.estimate.kv_bytes
    assert fit.estimate.staging_bytes == 0


def test_the_cache_gives_way_before_a_layer_leaves_the_gpu() -> None:
    fit = on(64, 7.5)
    assert fit.n_gpu_layers == N_LAYERS + 1
    assert fit.n_kv_cells < 32_768
    assert fit.n_kv_cells >= 8192


def test_what_a_gpu_cannot_hold_stays_in_ram() -> None:
    fit = on(64, 4)
    assert fit.fits
    assert 0 < fit.n_gpu_layers < N_LAYERS + 1
    assert any("layers on the GPU" in note for note in fit.notes)
    assert fit.devices[0].n_layers == N_LAYERS + 1 - fit.n_gpu_layers


def test_two_gpus_share_by_their_free_memory() -> None:
    fit = on(64, 24, 12)
    _, large, small = fit.devices
    assert large.n_layers + small.n_layers == N_LAYERS + 1
    assert large.n_layers == pytest.approx(2 * small.n_layers, abs=2)


def test_a_gpu_without_memory_of_its_own_is_not_counted_twice() -> None:
    assert not on(4, 4, shared=True).fits
    assert on(16, 11, shared=True).fits


def test_layers_that_were_asked_for_are_not_changed() -> None:
    fit = on(64, 2, n_gpu_layers=33)
    assert not fit.fits
    assert fit.n_gpu_layers == 33
    assert on(64, 2, n_gpu_layers=0).n_gpu_layers == 0


def test_tied_embeddings_are_copied_to_where_the_output_is() -> None:
    weights = layer_weights(make_header(tied=True))
    assert weights.output_bytes == EMBEDDING_BYTES + 4 * 4096
    assert weights.embedding_bytes == EMBEDDING_BYTES


def test_a_quantized_cache_is_not_chosen_where_heads_are_no_whole_blocks() -> None:
    header = make_header(**{"attention.key_length": 80, "attention.value_length": 80})
    for ram_gib in range(4, 16):
        assert choose(header, Machine(ram_gib * GIB), FitRequest(8)).kv_type == "f16"


def test_wanted_cells() -> None:
    assert wanted_cells(n_ctx_train=4096, n_slots=8, kv_cells=0) == 32_768
    assert wanted_cells(n_ctx_train=4096, n_slots=2, kv_cells=0) == 8192
    assert wanted_cells(n_ctx_train=4096, n_slots=2, kv_cells=1000) == 1024


@pytest.mark.parametrize(("n_slots", "expected"), [(8, 32_768), (6, 33_792), (1, 32_768)])
def test_streams_on_a_cpu_are_whole_steps_long(n_slots: int, expected: int) -> None:
    assert on(64, n_slots=n_slots).n_kv_cells == expected
    assert on(64, 64, n_slots=n_slots).n_kv_cells == 32_768, "one pool on a GPU"


def test_adapters_take_memory_too() -> None:
    machine = Machine(64 * GIB)
    plain, adapted = (choose(HEADER, machine, FitRequest(4, adapter_bytes=size)) for size in (0, GIB))
    assert adapted.estimate.total_bytes - plain.estimate.total_bytes == GIB
    assert adapted.devices[0].total_bytes - plain.devices[0].total_bytes == GIB


SMALL = make_header(block_count=2)


def test_a_draft_model_takes_its_weights_its_cells_and_its_vocabulary() -> None:
    alone, beside = on(64).estimate, on(64, draft=SMALL).estimate
    assert alone.draft is None
    draft = beside.draft
    assert draft is not None
    assert beside.total_bytes - alone.total_bytes == draft.total_bytes == beside.draft_bytes
    assert draft.weights_bytes == SMALL.weights_bytes
    assert draft.kv_bytes * N_LAYERS == alone.kv_bytes * 2, "as many cells, of two layers"
    assert 0 < draft.process_bytes < alone.process_bytes


def test_a_draft_model_costs_cells_before_it_is_left_out() -> None:
    beside = {fit.n_kv_cells: fit for ram in range(5, 40) if (fit := on(ram, draft=SMALL)).estimate.draft is not None}
    assert min(beside) < max(beside) == DEFAULT_POOL_CELLS
    assert all(fit.fits and fit.n_slots == 8 for fit in beside.values())
    without = on(10, draft=SMALL)
    assert without.fits
    assert without.estimate.draft is None
    assert without.n_kv_cells == on(10).n_kv_cells
    assert without.notes[-1] == "without the draft model: there is no room for it"


def test_a_draft_model_is_where_the_model_is() -> None:
    ram, gpu = on(64, 24, draft=SMALL).devices
    ram_alone, gpu_alone = on(64, 24).devices
    size_bytes = on(64, 24, draft=SMALL).estimate.draft_bytes
    assert (ram.other_bytes - ram_alone.other_bytes, gpu.other_bytes - gpu_alone.other_bytes) == (0, size_bytes)
    ram, gpu = on(64, 24, draft=SMALL, n_gpu_layers=0).devices
    assert (gpu.other_bytes, ram.other_bytes > size_bytes) == (0, True)
    ram, gpu = on(64, 24, draft=SMALL, n_gpu_layers=N_LAYERS).devices
    assert (gpu.other_bytes, ram.other_bytes > size_bytes) == (0, True), "nor with a part of the model"
    # On the first GPU that has layers.
    _, full, gpu = on(64, 0, 24, draft=SMALL).devices
    assert (full.other_bytes, gpu.other_bytes) == (0, size_bytes)


def test_what_lies_on_gpus_of_a_model_is_counted_by_its_layers() -> None:
    header = make_header()
    shares = [gpu_share(header, n) for n in range(header.n_layers + 3)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-2:] == [1, 1], "all layers and the output; llama.cpp takes more for all"
    weights = layer_weights(header)
    moved = weights.layers[-1] + weights.output_bytes
    assert shares[2] == pytest.approx(moved / header.weights_bytes)


def test_a_model_with_attention_sinks_gets_fewer_cells_before_rounded_ones() -> None:
    """With q8_0 gpt-oss kept three quarters of its likeliest tokens. The names are those of its files."""

    def ways(header: Header) -> list[tuple[str, int]]:
        wish = FitRequest(n_slots=1)
        chosen = [choose(header, Machine(ram_mib * 2**20), wish) for ram_mib in range(16_000, 2_000, -25)]
        settings = [(fit.kv_type, fit.n_kv_cells) for fit in chosen if fit.fits]
        return [each for at, each in enumerate(settings) if at == 0 or each != settings[at - 1]]

    plain = make_header()
    sinks = tuple(TensorInfo(f"blk.{layer}.attn_sinks.weight", (32,), "F32", 0, 128) for layer in range(plain.n_layers))
    with_sinks = replace(plain, tensors=(*plain.tensors, *sinks))
    assert ("q8_0", 8192) in ways(plain)
    found = ways(with_sinks)
    assert found[: len(found) - 1] == [each for each in found if each[0] == "f16"][: len(found) - 1]
    assert ("f16", 2048) in found
    assert ("q8_0", 8192) not in found
