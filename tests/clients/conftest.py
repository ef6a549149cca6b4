"""Daemons for the official clients: one with fake engines, one with the built-in model where its file is there. With
LOCALRUN_TEST_DOOR=1 it is a door of a cluster instead, whose engines run on another node (needs Ray)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.models import builtin
from tests.cluster.test_three_nodes import Node, free_port, until
from tests.daemon import Daemon, running_daemon

IS_DOOR = os.environ.get("LOCALRUN_TEST_DOOR") == "1"


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A cluster that runs the models which clients ask for, on fake engines."""
    folder = tmp_path_factory.mktemp("cluster")
    node = Node(folder, "n1", "127.0.0.1", folder / "models")
    node.environment |= {"LOCALRUN_FAKE_STEP_MS": "0", "LOCALRUN_KV_CELLS": "2048", "LOCALRUN_SLOTS": "4"}
    try:
        node.start("up", "--port", str(node.port), "--head-port", str(free_port()))
        node.says("localrun is listening")
        node.run("deploy", "tiny")
        yield node
    finally:
        node.stop()


@pytest.fixture(scope="module", params=["door"] if IS_DOOR else ["fake", "tiny"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    if request.param == "door":
        yield from _door(request.getfixturevalue("head"))
        return
    if request.param == "tiny" and not builtin.model_path().is_file():
        pytest.skip("the built-in model's file is not there")
    with running_daemon(fake=request.param == "fake") as running:
        yield running


def _door(head: Node) -> Iterator[Daemon]:
    door = Node(head.home.parent, f"door{free_port()}", "127.0.0.2", head.home.parent / "none")
    door.environment |= {"LOCALRUN_FAKE_STEP_MS": "0", "LOCALRUN_KV_CELLS": "2048", "LOCALRUN_SLOTS": "4"}
    token = head.home / "state" / "cluster.token"
    address = next(word for word in head.log.split() if word.startswith("127.0.0.1:"))
    door.start("join", address, "--token-file", str(token), "--door", "--port", str(door.port))
    try:
        door.says("localrun is listening")
        assert isinstance(door.process, subprocess.Popen)
        daemon = Daemon(f"http://127.0.0.1:{door.port}", door.process, Path(door.home) / "log.txt")
        until(lambda: any(row["replica"] for row in door.engines()), "a replica")
        yield daemon
        daemon.http.close()
    finally:
        door.stop()
