"""A synthesized model file that the tests of this folder share. They only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthesized") / "tiny-q4_0.gguf"
    synthesize("tiny", "Q4_0", path)
    return path
