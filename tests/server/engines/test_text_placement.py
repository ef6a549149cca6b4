"""From settings and a machine to a placement, or to a refusal that names the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from localrun.config import Settings
from localrun.errors import CannotFit
from localrun.models.fit import Gpu, Machine
from localrun.models.gguf import read_header
from localrun.models.header import Header
from localrun.server.engines.placement import Placement
from localrun.server.engines.text_placement import place_text

MIB = 1024**2


@pytest.fixture
def header(small_model: Path) -> Header:
    return read_header(small_model)


def place(header: Header, ram_mib: int, *gpu_mib: int, **settings: Any) -> Placement:
    gpus = tuple(Gpu("GPU", mib * MIB) for mib in gpu_mib)
    return place_text("m", header, Settings(**settings), Machine(ram_mib * MIB, gpus))


def test_plenty_of_memory_gives_what_the_settings_say(header: Header) -> None:
    placement = place(header, 64_000, slots=3)
    assert (placement.n_slots, placement.kv_type, placement.n_kv_cells) == (3, "f16", 3 * 4096)
    assert placement.n_gpu_layers == -1, "without known GPUs the engine decides"


def test_short_memory_gives_smaller_cells_and_fewer_slots(header: Header) -> None:
    wide = place(header, 64_000)
    for ram_mib in range(400, 60, -10):
        try:
            tight = place(header, ram_mib)
        except CannotFit:
            break
        assert tight.needed_bytes <= 0.8 * ram_mib * MIB
    assert tight.n_kv_cells < wide.n_kv_cells
    assert tight.kv_type == "q8_0"
    assert tight.n_slots < wide.n_slots


def test_a_chosen_type_is_kept(header: Header) -> None:
    assert place(header, 64_000, kv_type="q4_0").kv_type == "q4_0"
    assert place(header, 150, kv_type="f16").kv_type == "f16"


def test_chosen_cells_are_taken_as_they_are_or_refused(header: Header) -> None:
    assert place(header, 64_000, kv_cells=10_000).n_kv_cells == 10_240
    with pytest.raises(CannotFit, match=r"use fewer KV cells \(--kv-cells \d+ would fit\)"):
        place(header, 200, kv_cells=1_000_000)


def test_a_refusal_has_both_numbers_and_a_way_out(header: Header) -> None:
    with pytest.raises(CannotFit) as caught:
        place(header, 10)
    message = caught.value.message
    assert re.match(r"model 'm' needs [\d.]+ [MG]B of memory \(weights [\d.]+ [MG]B, KV cache", message)
    assert re.search(r"but [\d.]+ MB is available, of which 80% may be used;", message)
    assert "smaller model" in message


def test_a_gpu_takes_the_layers_and_leaves_little_in_ram(header: Header) -> None:
    placement = place(header, 1000, 4000)
    assert placement.n_gpu_layers == header.n_layers + 1
    assert placement.needed_bytes < place(header, 1000).needed_bytes
    assert place(header, 1000, 4000, gpu_layers=2).n_gpu_layers == 2
