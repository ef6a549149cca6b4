"""Daemons for the official clients: one with fake engines, one with the built-in model where its file is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon


@pytest.fixture(scope="module", params=["fake", "tiny"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    if request.param == "tiny" and not builtin.model_path().is_file():
        pytest.skip("the built-in model's file is not there")
    with running_daemon(fake=request.param == "fake") as running:
        yield running
