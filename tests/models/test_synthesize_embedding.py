"""Synthesized embedding models are whole files, the same every time; what they compute, the engine's tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.errors import BadRequest
from localrun.models.gguf.reader import read_header
from tests.models.synthesize_embedding import KINDS, synthesize_embedding


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_small_sound_and_repeatable(kind: str, tmp_path: Path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    synthesize_embedding(kind, first)
    synthesize_embedding(kind, second)
    assert first.read_bytes() == second.read_bytes()
    synthesize_embedding(kind, second, seed=1)
    assert first.read_bytes() != second.read_bytes()
    assert first.stat().st_size < 2_000_000
    header = read_header(first)
    assert header.architecture == KINDS[kind].architecture
    assert (header.pooling == "rank") == kind.endswith("reranker")
    assert not header.generates


def test_an_unknown_kind_is_refused(tmp_path: Path):
    with pytest.raises(BadRequest, match="tiny-bert"):
        synthesize_embedding("huge", tmp_path / "model.gguf")
