"""A daemon that the faults of one file share: each must leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def real_daemon() -> Iterator[Daemon]:
    """With llama.cpp and the built-in model."""
    with running_daemon(fake=False) as running:
        yield running
