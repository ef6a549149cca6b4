"""A daemon with fake engines over headers of every kind: an encoder, a reranker, and the built-in chat model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon, running_daemon
from tests.models.synthesize_embedding import synthesize_embedding
from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="session")
def embedding_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    synthesize_embedding("tiny-bert", folder / "bert.gguf")
    synthesize_embedding("tiny-bert-reranker", folder / "ranker.gguf")
    synthesize("tiny", "Q4_0", folder / "chat.gguf")
    return folder


@pytest.fixture(scope="session")
def daemon(embedding_models: Path) -> Iterator[Daemon]:
    """The encoder reads 128 tokens, as its file says; each byte of a text is one."""
    with running_daemon(LOCALRUN_MODELS=str(embedding_models)) as running:
        yield running
