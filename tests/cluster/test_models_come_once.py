"""A real cluster of two nodes, of which one has models: the other one gets them, and what fits nowhere is refused."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_three_nodes import Node, free_port, until
from tests.server.conftest import copies, small_model

__all__ = ["small_model"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class Two:
    def __init__(self, folder: Path, models: Path) -> None:
        self.empty = folder / "none"
        self.head = Node(folder, "n1", "127.0.0.1", models)
        self.other = Node(folder, "n2", "127.0.0.2", self.empty)
        head_port = free_port()
        self.head.start("up", "--port", str(self.head.port), "--head-port", str(head_port))
        self.head.says("localrun is listening")
        token = self.head.home / "state" / "cluster.token"
        self.other.start(
            "join", f"127.0.0.1:{head_port}", "--token-file", str(token), "--door", "--port", str(self.other.port)
        )
        self.other.says("localrun is listening")

    def ask(self, node: Node, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{node.port}{path}", None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> None:
        self.other.stop()
        self.head.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    models = copies(small_model, folder / "models")
    two = Two(folder, models)
    try:
        yield two
    finally:
        two.stop()


def test_a_node_gets_the_model_that_it_is_to_run(two: Two) -> None:
    two.head.run("deploy", "alpha", "--replicas", "2")

    def ready() -> Any:
        status = two.head.status()
        return len(status["apps"][0]["replicas"]) == 2 and status

    status = until(ready, "two replicas")
    assert {one["node"] for one in status["apps"][0]["replicas"]} == {"n1", "n2"}
    assert all(node["has"]["ram_bytes"] > 0 and node["has"]["files_port"] > 0 for node in status["nodes"])
    assert len(list((two.empty / "blobs").glob("sha256-*"))) == 1


def test_a_door_without_the_model_shows_and_asks_it(two: Two) -> None:
    until(lambda: any(row["model"] == "beta:latest" for row in two.ask(two.head, "/api/tags")["models"]), "the list")
    two.head.run("deploy", "beta")
    row = until(
        lambda: next((row for row in two.ask(two.other, "/api/tags")["models"] if row["model"] == "beta:latest"), None),
        "the card",
    )
    assert row["source"] in ("cluster", "beta")  # it may be the node that runs it
    body = {"model": "beta", "prompt": "hello", "stream": False, "options": {"num_predict": 5, "temperature": 0}}
    assert two.ask(two.other, "/api/generate", body)["response"] == two.ask(two.head, "/api/generate", body)["response"]


def test_a_model_that_fits_on_no_node_is_not_deployed(two: Two) -> None:
    with pytest.raises(AssertionError, match=r"'alpha' fits on no node: each replica needs .* n1 has .*; n2 has "):
        two.head.run("deploy", "alpha", "--num-ctx", "2000000000")
    (app,) = [app for app in two.head.status()["apps"] if app["description"]["model"] == "alpha"]
    assert app["state"] == "running"
    assert app["description"]["load"].get("num_ctx") is None


def test_a_model_that_could_not_be_started_is_deployed_again(two: Two) -> None:
    refuses = [node.home / "state" / "refuses" for node in (two.head, two.other)]
    for path in refuses:
        path.touch()
    with pytest.raises(AssertionError, match="'beta' cannot be run: the memory is broken"):
        two.head.run("deploy", "beta", "--slots", "3")
    for path in refuses:
        path.unlink()
    assert "the cluster runs beta" in two.head.run("deploy", "beta", "--slots", "3")
