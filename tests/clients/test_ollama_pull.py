"""Pulls with the official Ollama client: from a loopback registry and a loopback hub, and over a killed daemon."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import ollama
import pytest

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.hub.repository import Repository
from tests.hub.server import Hub
from tests.registry import Layer, Registry

pytestmark = pytest.mark.skipif(not builtin.model_path().is_file(), reason="the built-in model's file is not there")

FILE = "Qwen3-0.6B-Q4_K_M.gguf"


def content() -> bytes:
    return builtin.model_path().read_bytes()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as running:
        yield running


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(Repository("unsloth/Qwen3-0.6B-GGUF", {FILE: content()})) as running:
        yield running


@pytest.fixture
def daemon(tmp_path: Path, hub: Hub) -> Iterator[Daemon]:
    with running_daemon(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "hf")) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ollama.Client]:
    with ollama.Client(host=daemon.url, trust_env=False) as connected:
        yield connected


def test_a_registry_s_model_is_pulled_shown_and_used(client: ollama.Client, registry: Registry) -> None:
    name = registry.add(
        "library/fox",
        Layer("model", content()),
        Layer("params", b'{"temperature": 0.25, "stop": ["</s>"]}'),
        Layer("system", b"Be a fox."),
        Layer("license", b"MIT License"),
        Layer("template", b"{{ .Prompt }}"),
        tag="1b",
    )
    parts = list(client.pull(name, stream=True))
    assert parts[0].status == "pulling manifest"
    assert [part.status for part in parts[-3:]] == ["verifying sha256 digest", "writing manifest", "success"]
    moved = [part for part in parts if part.digest]
    assert {(part.digest, part.total) for part in moved} == {(Layer("model", content()).digest, len(content()))}
    completed = [part.completed or 0 for part in moved]
    assert completed == sorted(completed)
    assert completed[-1] == len(content())
    assert client.pull(name).status == "success"
    assert name in [model.model for model in client.list().models]
    shown = client.show(name)
    assert "MIT License" in (shown.license or "")
    assert "temperature" in (shown.parameters or "")
    assert client.generate(name, "hi", options={"num_predict": 2}).eval_count == 2


def test_a_model_is_made_from_one_that_is_not_here_yet(client: ollama.Client, hub: Hub) -> None:
    """As `ollama create` does it: what FROM names is pulled first, and stays."""
    parts = [part.status for part in client.create("fox", from_="qwen3:0.6b", system="Be a fox.", stream=True)]
    assert (parts[0], parts.count("success"), parts[-1]) == ("pulling manifest", 1, "success")
    assert {"fox:latest", "qwen3:0.6b"} <= {model.model for model in client.list().models}
    assert client.generate("fox", "hi", options={"num_predict": 2}).done
    assert "pulling manifest" not in [
        part.status for part in client.create("hen", from_="qwen3:0.6b", system="Be a hen.", stream=True)
    ]
    with pytest.raises(ollama.ResponseError, match="no-such-repository"):
        client.create("none", from_="hf.co/unsloth/no-such-repository")
    with pytest.raises(ollama.ResponseError, match="there is no file"):
        client.create("none", from_="/no/such/file.gguf")


def test_a_catalogue_name_and_its_repository_are_one_file(client: ollama.Client, hub: Hub) -> None:
    assert client.pull("qwen3:0.6b").status == "success"
    sent = hub.record.content_bytes
    assert client.pull("hf.co/unsloth/Qwen3-0.6B-GGUF:Q4_K_M").status == "success"
    assert hub.record.content_bytes == sent
    assert {"qwen3:0.6b", "hf.co/unsloth/Qwen3-0.6B-GGUF:Q4_K_M"} <= {model.model for model in client.list().models}
    assert client.generate("qwen3:0.6b", "hi", options={"num_predict": 2}).done


def test_failures_are_response_errors(client: ollama.Client, registry: Registry) -> None:
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.pull(f"{registry.host}/library/nothing", stream=True))
    with pytest.raises(ollama.ResponseError) as whole:
        client.pull(f"{registry.host}/library/nothing")
    assert whole.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as bad:
        client.pull("../../etc/passwd")
    assert bad.value.status_code == 400


def test_a_client_that_goes_ends_its_pull(daemon: Daemon, client: ollama.Client, registry: Registry) -> None:
    name = registry.add("library/fox", Layer("model", content()))
    registry.bytes_per_s = 400_000
    with contextlib.closing(client.pull(name, stream=True)) as parts:
        assert next(part for part in parts if part.completed)
    wait_for(lambda: [row["state"] for row in pulls(daemon)] == ["cancelled"])
    assert registry.content_bytes < len(content())


def test_a_pull_that_is_cancelled_ends_with_an_error(daemon: Daemon, client: ollama.Client, registry: Registry) -> None:
    name = registry.add("library/fox", Layer("model", content()))
    registry.bytes_per_s = 400_000
    parts = client.pull(name, stream=True)
    assert next(part for part in parts if part.completed)
    answer = daemon.http.delete("/localrun/v1/pulls", params={"model": name})
    assert answer.json() == {"model": name, "cancelled": True}
    with pytest.raises(ollama.ResponseError, match="cancelled"):
        list(parts)


def test_a_killed_daemon_s_pull_goes_on_with_the_next_one(tmp_path: Path, registry: Registry) -> None:
    name = registry.add("library/fox", Layer("model", content()))
    registry.bytes_per_s = 600_000
    home = {"LOCALRUN_HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hf")}
    with running_daemon(**home) as first:
        asking = threading.Thread(target=pull_and_fail, args=(first, name))
        asking.start()
        wait_for(lambda: any(row["completed_bytes"] > 1_500_000 for row in pulls(first)))
        first.stop(signal.SIGKILL)
        asking.join()
    registry.bytes_per_s = None
    with running_daemon(**home) as second:
        wait_for(lambda: [row["state"] for row in pulls(second)] == ["done"])
        assert name in [row["name"] for row in second.http.get("/api/tags").json()["models"]]
    # What was on its way, and what was not yet written down, is sent again.
    assert registry.content_bytes < len(content()) + 4_000_000


def pull_and_fail(daemon: Daemon, name: str) -> None:
    with pytest.raises(httpx2.HTTPError):
        httpx2.post(f"{daemon.url}/api/pull", json={"model": name}, timeout=60, trust_env=False)


def pulls(daemon: Daemon) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = daemon.http.get("/localrun/v1/pulls").json()["pulls"]
    return rows


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)
