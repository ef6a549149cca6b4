"""Sizes of another quantization, against the files that others have published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrun import stored
from localrun.config import Settings
from localrun.errors import BadRequest, LocalrunError
from localrun.hardware.memory import Memory
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import read_header
from localrun.models.storage.store import Store
from localrun.plan.calibration import Calibration, kept
from localrun.plan.costs import StreamCosts
from localrun.plan.roofline import MIXES, estimate, requantized, rescaled
from tests.plan.made import costs, layout
from tests.plan.published import header_of
from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Header:
    return header_of("Llama 3.1 8B", "Q8_0", tmp_path_factory.mktemp("eight"))


@pytest.mark.parametrize(
    ("name", "size_gb"),
    [("Q4_0", 4.66), ("Q4_K_M", 4.92), ("Q5_K_M", 5.73), ("Q6_K", 6.60), ("Q8_0", 8.54), ("F16", 16.07)],
)
def test_files_of_llama_31_8b_are_as_large_as_published(eight: Header, name: str, size_gb: float) -> None:
    """The sizes are those of bartowski's repository on the hub, metadata included."""
    found = requantized(eight, name)
    assert found.weights_bytes / 1e9 == pytest.approx(size_gb, rel=0.01)
    assert found.quantization == name


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K_M", "Q8_0", "F16"])
def test_a_file_in_its_own_quantization_keeps_its_size(tmp_path: Path, name: str) -> None:
    """Written by hand, as the quantizer would: tensor for tensor the same types."""
    path = tmp_path / "own.gguf"
    synthesize("tiny", {"Q4_K_M": "Q4_K"}.get(name, name), path)
    header = read_header(path)
    assert [tensor.type_name for tensor in requantized(header, name).tensors] == [
        tensor.type_name for tensor in header.tensors
    ]
    assert requantized(header, name).size_bytes == header.size_bytes


def test_steps_are_scaled_by_what_they_read(eight: Header) -> None:
    """Q8_0 has 34 bytes for 32 weights and F16 has 64; the embedding is not read."""
    before = costs(streams=StreamCosts((1, 8), (0.034, 0.068), (1e-6, 1e-6)))
    after = rescaled(before, eight, requantized(eight, "F16"))
    assert after.streams.base_s == pytest.approx((0.064, 0.128), rel=1e-3)
    assert after.streams.per_token_s == before.streams.per_token_s
    assert after.background == before.background
    assert rescaled(before, eight, eight) == before


def test_an_unknown_quantization_gets_the_nearest(eight: Header) -> None:
    with pytest.raises(BadRequest, match="did you mean 'Q4_K_M'"):
        requantized(eight, "Q4_K_MM")
    with pytest.raises(BadRequest, match=", ".join(MIXES)):
        requantized(eight, "int3")


@pytest.mark.parametrize(
    ("n_cells", "words"),
    [
        ("1", "1 KV cells are too few: 4 slots have at least 1024"),
        ("16777216", "of 16777216 KV cells, and .* are free"),
    ],
)
def test_cells_that_no_machine_would_have_are_refused(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, n_cells: str, words: str
) -> None:
    made = Calibration(
        made_at="", machine="", model="tiny", build="b", layout=layout(), costs=costs(), median_error=0.0,
        worst_error=0.0, others=0.0,
    )  # fmt: skip
    monkeypatch.setattr("localrun.plan.roofline.machine_memory", lambda: Memory(1 << 30, 1 << 30))
    model = Store.of(Settings()).resolve(str(tiny_gguf))
    with pytest.raises(LocalrunError, match=words):
        estimate(model, Settings(), {"kv-cells": n_cells}, lambda *_: made)
    assert estimate(model, Settings(), {"kv-cells": "2048"}, lambda *_: made).setup.layout.n_cells == 2048


@pytest.mark.parametrize(
    ("of", "value"),
    [("layout.slots", 0), ("layout.n_cells", -5), ("layout.n_batch", 0), ("layout.n_batch", 3),
     ("costs.streams.streams", []), ("costs.streams.streams", [8, 1]), ("costs.background.row_s", -1),
     ("costs.delta_s", 1e300)],
)  # fmt: skip
def test_a_calibration_of_nonsense_is_none(tmp_path: Path, of: str, value: object) -> None:
    made = Calibration(
        made_at="", machine="", model="tiny", build="b", layout=layout(), costs=costs(), median_error=0.0,
        worst_error=0.0, others=0.0,
    )  # fmt: skip
    path = tmp_path / "calibration.json"
    stored.write(path, made)
    assert kept(path) == made
    whole = json.loads(path.read_text())
    *outer, name = of.split(".")
    inner = whole
    for each in outer:
        inner = inner[each]
    inner[name] = value
    path.write_text(json.dumps(whole))
    assert kept(path) is None
