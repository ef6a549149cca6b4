"""A daemon with fake engines and one model of each kind, by which every route has something to do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon import Daemon, running_daemon
from tests.models.synthesize_embedding import synthesize_embedding
from tests.server.openai.test_fim_routes import write_model


@pytest.fixture(scope="session")
def models_of_each_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bert` makes vectors, `ranker` ranks, `code` fills in; the built-in `tiny` chats."""
    folder = tmp_path_factory.mktemp("models")
    synthesize_embedding("tiny-bert", folder / "bert.gguf")
    synthesize_embedding("tiny-bert-reranker", folder / "ranker.gguf")
    write_model(folder / "code.gguf")
    return folder


@contextmanager
def started(models: Path) -> Iterator[Daemon]:
    """It reaches nothing outside this machine."""
    with running_daemon(
        LOCALRUN_MODELS=str(models), LOCALRUN_MAX_MODELS="8", HF_ENDPOINT="http://127.0.0.1:1", HF_HUB_OFFLINE="1"
    ) as running:
        yield running


@pytest.fixture
def daemon(models_of_each_kind: Path, tmp_path: Path) -> Iterator[Daemon]:
    """With files of its own: whoever sends anything at all deletes models, too."""
    with started(shutil.copytree(models_of_each_kind, tmp_path / "models")) as running:
        yield running


@pytest.fixture(scope="module")
def shared_daemon(models_of_each_kind: Path) -> Iterator[Daemon]:
    with started(models_of_each_kind) as running:
        yield running
