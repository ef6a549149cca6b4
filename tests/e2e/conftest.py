"""Daemons with real engines: the built-in model, and a second, synthesized one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon, running_daemon
from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the smallest shape."""
    path = tmp_path_factory.mktemp("models") / "other.gguf"
    synthesize("tiny", "F16", path)
    return path


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """With one thread, or what a file of tests names `THREADS`."""
    threads = getattr(request.module, "THREADS", "1")
    with running_daemon("--slots", "8", "--kv-cells", "16384", fake=False, LOCALRUN_THREADS=threads) as running:
        yield running
