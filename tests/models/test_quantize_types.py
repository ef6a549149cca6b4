"""Names of quantizations, and what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.errors import BadRequest
from localrun.models import quantize_types
from localrun.models.gguf import read_header
from localrun.models.synthesize import synthesize


def test_names() -> None:
    assert quantize_types.file_type("q4_k_m") == quantize_types.file_type("Q4_K") == 15
    assert quantize_types.canonical("q4_K_M") == "Q4_K_M"
    for wrong in ("q9", "", "IQ1_S"):  # the last one needs a calibration text
        with pytest.raises(BadRequest, match="is not one of Q8_0, Q6_K"):
            quantize_types.file_type(wrong)


def test_only_whole_weights_are_quantized(tiny_gguf: Path) -> None:
    with pytest.raises(BadRequest, match=r"'x' is Q4_0 already.*begin with an F16"):
        quantize_types.check_source(read_header(tiny_gguf), "x")


def test_the_expected_size_is_rather_too_much(tmp_path: Path) -> None:
    sizes = {}
    for kind in ("F16", "Q8_0", "Q4_0"):
        synthesize("tiny", kind, tmp_path / kind)
        sizes[kind] = (tmp_path / kind).stat().st_size
    header = read_header(tmp_path / "F16")
    quantize_types.check_source(header, "x")
    for kind in ("Q8_0", "Q4_0", "Q4_K_M"):
        assert sizes.get(kind, 0) <= quantize_types.expected_bytes(header, kind) < sizes["F16"]
