"""What every test may be asked: whether the suites of real clients run, which install packages."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients", action="store_true", help="run the suites of real clients; installs each of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--clients") or os.environ.get("LOCALRUN_TEST_CLIENTS") == "1":
        return
    skip = pytest.mark.skip(reason="installs packages: give --clients or LOCALRUN_TEST_CLIENTS=1")
    for item in items:
        if item.get_closest_marker("clients"):
            item.add_marker(skip)
