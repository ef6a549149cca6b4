"""Names of quantizations, and what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.errors import BadRequest
from localrun.models import creation
from localrun.models.gguf import read_header
from localrun.models.synthesize import synthesize


def test_names() -> None:
    assert creation.quantization_number("q4_k_m") == creation.quantization_number("Q4_K") == 15
    assert creation.canonical_quantization("q4_K_M") == "Q4_K_M"
    for wrong in ("q9", "", "IQ1_S"):  # the last one needs a calibration text
        with pytest.raises(BadRequest, match="is not one of Q8_0, Q6_K"):
            creation.quantization_number(wrong)


def test_only_whole_weights_are_quantized(tiny_gguf: Path) -> None:
    with pytest.raises(BadRequest, match=r"'x' is Q4_0 already.*begin with an F16"):
        creation.check_quantizable(read_header(tiny_gguf), "x")


def test_the_expected_size_is_rather_too_much(tmp_path: Path) -> None:
    sizes = {}
    for kind in ("F16", "Q8_0", "Q4_0"):
        synthesize("tiny", kind, tmp_path / kind)
        sizes[kind] = (tmp_path / kind).stat().st_size
    header = read_header(tmp_path / "F16")
    creation.check_quantizable(header, "x")
    for kind in ("Q8_0", "Q4_0", "Q4_K_M"):
        assert sizes.get(kind, 0) <= creation.quantized_bytes(header, kind) < sizes["F16"]
