"""A model file that nobody opens but to read its header."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.gguf"
    synthesize("tiny", "Q8_0", path)
    return path
