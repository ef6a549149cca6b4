"""How many KV cells a model gets for the memory there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from localrun.config import Settings
from localrun.errors import CannotFit
from localrun.models.fit import Gpu, Machine
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import read_header
from localrun.server.engines.placement import Placement, place_text, wish_of

MIB = 1024**2


@pytest.fixture
def header(small_model: Path) -> Header:
    return read_header(small_model)


def placed_text(header: Header, ram_mib: int, *gpu_mib: int, **settings: Any) -> Placement:
    gpus = tuple(Gpu("GPU", mib * MIB) for mib in gpu_mib)
    return place_text("m", header, Machine(ram_mib * MIB, gpus), wish_of(Settings(**settings)))


def test_plenty_of_memory_gives_what_the_settings_say(header: Header) -> None:
    placement = placed_text(header, 64_000, slots=3)
    assert (placement.n_slots, placement.kv_type, placement.n_kv_cells) == (3, "f16", 3 * 4096)
    assert placement.n_gpu_layers == -1, "without known GPUs the engine decides"


def test_short_memory_gives_smaller_cells_and_fewer_slots(header: Header) -> None:
    wide = placed_text(header, 64_000)
    for ram_mib in range(400, 60, -10):
        try:
            tight = placed_text(header, ram_mib)
        except CannotFit:
            break
        assert tight.needed_bytes <= 0.8 * ram_mib * MIB
    assert tight.n_kv_cells < wide.n_kv_cells
    assert tight.kv_type == "q8_0"
    assert tight.n_slots < wide.n_slots


def test_a_chosen_type_is_kept(header: Header) -> None:
    assert placed_text(header, 64_000, kv_type="q4_0").kv_type == "q4_0"
    assert placed_text(header, 150, kv_type="f16").kv_type == "f16"


def test_chosen_cells_are_taken_as_they_are_or_refused(header: Header) -> None:
    assert placed_text(header, 64_000, kv_cells=10_000).n_kv_cells == 10_240
    with pytest.raises(CannotFit, match=r"use fewer KV cells \(--kv-cells \d+ would fit\)"):
        placed_text(header, 200, kv_cells=1_000_000)


def test_a_refusal_of_a_model_that_generates_has_both_numbers_and_a_way_out(header: Header) -> None:
    with pytest.raises(CannotFit) as caught:
        placed_text(header, 10)
    message = caught.value.message
    assert re.match(r"model 'm' needs [\d.]+ [MG]B of memory \(weights [\d.]+ [MG]B, KV cache", message)
    assert re.search(r"but [\d.]+ MB is available, of which 80% may be used;", message)
    assert "smaller model" in message


def test_a_gpu_takes_the_layers_and_leaves_little_in_ram(header: Header) -> None:
    placement = placed_text(header, 1000, 4000)
    assert placement.n_gpu_layers == header.n_layers + 1
    assert placement.needed_bytes < placed_text(header, 1000).needed_bytes
    assert placed_text(header, 1000, 4000, gpu_layers=2).n_gpu_layers == 2


def test_a_context_is_kept_or_refused_with_what_would_fit(header: Header) -> None:
    def placed(ram_mib: int, n_ctx: int, **settings: Any) -> Placement:
        wish = wish_of(Settings(**{"slots": 2, **settings}), n_ctx=n_ctx)
        return place_text("m", header, Machine(ram_mib * MIB), wish)

    assert placed(64_000, 100_000).n_kv_cells == 100_352
    assert placed(64_000, 100_000, kv_cells=512).n_kv_cells == 100_352
    assert placed(64_000, 100_000, kv_cells=120_000).n_kv_cells == 120_320
    assert placed(64_000, 300).n_kv_cells == 2 * 4096, "no less than without"
    with pytest.raises(CannotFit, match=r"use a smaller num_ctx than 1000000 \(\d+ would fit\)"):
        placed(300, 1_000_000)


def test_what_was_asked_for_is_named_in_a_refusal(header: Header) -> None:
    f16, q8_0 = (  # with one slot, which needs no pool beside its stream
        placed_text(header, 64_000, kv_cells=200_000, kv_type=kv_type, slots=1).needed_bytes
        for kv_type in ("f16", "q8_0")
    )
    between_mib = int((f16 + q8_0) / 2 / 0.8 / MIB)
    with pytest.raises(CannotFit, match=r"--kv-cells \d+ would fit"):
        placed_text(header, between_mib, kv_cells=200_000, kv_type="f16")
    with pytest.raises(CannotFit, match=r"put fewer layers on the GPU than 5 .*gpu_layers: 0 would fit"):
        placed_text(header, 4000, 1, gpu_layers=5)


def test_a_type_that_is_too_large_is_named_in_a_refusal(header: Header) -> None:
    messages = []
    for ram_mib in range(400, 60, -1):
        try:
            placed_text(header, ram_mib, kv_type="f16")
        except CannotFit as refusal:
            messages.append(refusal.message)
    assert "leave kv_type f16 out (q8_0 would fit)" in messages[0]
    assert "take a smaller model" in messages[-1]
