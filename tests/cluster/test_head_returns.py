"""A real cluster of two nodes on this machine whose head is lost and comes back: what doors do meanwhile, and what is
there again by itself."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrun.access import keys
from localrun.access.keys import REQUESTS, KeyFile, Limit
from tests.cluster.test_three_nodes import PATIENCE_S, Node, free_port, until
from tests.server.conftest import copies, small_model

__all__ = ["small_model"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class Pair:
    """The head and another door."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.head, self.door = Node(folder, "n1", "127.0.0.1", models), Node(folder, "n2", "127.0.0.2", models)
        self._head_port = free_port()
        self.clients = ThreadPoolExecutor(16)
        self._n_starts = 0

    def start_head(self) -> None:
        self._n_starts += 1
        self.head.start("up", "--port", str(self.head.port), "--head-port", str(self._head_port))

    def head_is_up(self) -> None:
        log = self.head.home.parent / "n1.log"
        until(lambda: log.read_text().count("localrun is listening") == self._n_starts, "the head")

    def start(self) -> None:
        self.start_head()
        self.head_is_up()
        token = self.head.home / "state" / "cluster.token"
        self.door.start(
            "join", f"127.0.0.1:{self._head_port}", "--token-file", str(token), "--door", "--port", str(self.door.port)
        )
        self.door.says("localrun is listening")

    def n_ready(self) -> int:
        apps = self.head.status()["apps"]
        return sum(not one["why_not"] for app in apps for one in app["replicas"])


@pytest.fixture(scope="module")
def pair(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair(folder, copies(small_model, folder / "models"))
    try:
        pair.start()
        yield pair
    finally:
        pair.door.stop()
        pair.head.stop()
        pair.clients.shutdown()


def call(node: Node, path: str, key: str, body: Any = None, *, content_type: str = "application/json") -> Any:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} | ({"Content-Type": content_type} if data else {})
    request = urllib.request.Request(f"http://127.0.0.1:{node.port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


def generate(node: Node, key: str, prompt: str, n_tokens: int) -> str:
    options = {"temperature": 0, "num_predict": n_tokens, "ignore_eos": True}
    body = {"model": "alpha", "prompt": prompt, "raw": True, "stream": False, "options": options}
    text: str = call(node, "/api/generate", key, body)["response"]
    return text


def batch(node: Node, key: str, n_lines: int) -> str:
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "alpha", "prompt": f"line {n}", "max_tokens": 5, "temperature": 0}}
        for n in range(n_lines)
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines))
    form = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        f'Content-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n{content}\r\n--b--\r\n'
    )
    file = call(node, "/v1/files", key, form.encode(), content_type="multipart/form-data; boundary=b")["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    found: str = call(node, "/v1/batches", key, asked)["id"]
    return found


def used(node: Node) -> dict[str, int]:
    local = keys.local_key(node.home / "state", node.port)
    rows = call(node, "/localrun/v1/usage", local)["rows"]
    return {row["name"]: row["requests"] for row in rows}


def test_doors_go_on_without_the_head_and_it_comes_back_with_keys_use_and_models(pair: Pair):
    file = KeyFile(pair.head.home / "data")
    free, limited = file.create("free"), file.create("limited", limits=(Limit(REQUESTS, 1000, 86400.0),))
    pair.head.run("deploy", "alpha", "--replicas", "2")
    until(lambda: pair.n_ready() == 2, "both replicas")
    expected = [generate(pair.door, limited.text, f"stream {n}", 300) for n in range(4)]
    assert generate(pair.head, limited.text, "stream 0", 300) == expected[0]
    batch_id = batch(pair.door, free.text, 40)

    streams = [
        pair.clients.submit(generate, pair.door, free.text, f"stream {n}", 300) for n in range(4)
    ]  # fmt: skip
    until(lambda: call(pair.door, f"/v1/batches/{batch_id}", free.text)["request_counts"]["completed"] > 2, "lines")
    pair.head.kill()
    assert [one.result(PATIENCE_S) for one in streams] == expected
    assert generate(pair.door, free.text, "stream 1", 300) == expected[1]

    streams = [pair.clients.submit(generate, pair.door, free.text, f"stream {n}", 300) for n in range(4)]
    pair.start_head()
    assert [one.result(PATIENCE_S) for one in streams] == expected
    pair.head_is_up()
    until(lambda: pair.n_ready() == 2, "both replicas again")
    for node in (pair.head, pair.door):
        assert generate(node, limited.text, "stream 2", 300) == expected[2]
    until(lambda: call(pair.door, f"/v1/batches/{batch_id}", free.text)["status"] == "completed", "the batch")
    assert call(pair.door, f"/v1/batches/{batch_id}", free.text)["request_counts"] == {
        "total": 40, "completed": 40, "failed": 0,
    }  # fmt: skip
    until(lambda: used(pair.head) == {"free": 49, "limited": 7}, "what was used")
    assert used(pair.door) == used(pair.head)

    assert "does not run alpha" in pair.door.run("deploy", "alpha", "--replicas", "0")
    until(lambda: json.loads((pair.head.home / "state" / "cluster-apps.json").read_text()) == {}, "its end")
