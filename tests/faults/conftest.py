"""Daemons that the faults of one file share: each fault must leave them as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """With fake engines whose steps take long enough to be interrupted."""
    with running_daemon(LOCALRUN_FAKE_STEP_MS="5", LOCALRUN_BATCH_TOKENS="32") as running:
        yield running


@pytest.fixture(scope="module")
def real_daemon() -> Iterator[Daemon]:
    """With llama.cpp and the built-in model."""
    with running_daemon(fake=False, GGML_NO_BACKTRACE="1") as running:
        yield running
