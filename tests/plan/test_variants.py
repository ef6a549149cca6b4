"""Sizes of another quantization, against the files that others have published."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.errors import BadRequest
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import read_header
from localrun.models.gguf.requantized import MIXES, requantized
from localrun.plan.costs import StreamCosts
from localrun.plan.variants import rescaled
from tests.plan.made import costs
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
