"""The official `ollama` client managing models of a real daemon: create, copy, delete, list, show, blobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from localrun.models import builtin
from tests.daemon import Daemon
from tests.lora_file import write_lora
from tests.support.synthesis.synthesize import synthesize

HELLO = [{"role": "user", "content": "Hello! Who are you?"}]
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ollama.Client]:
    connected = ollama.Client(host=daemon.url, trust_env=False)
    yield connected
    connected._client.close()


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("client") / "f16.gguf"
    synthesize("tiny", "F16", path)
    return path


def names(client: ollama.Client) -> list[str | None]:
    return [model.model for model in client.list().models]


def test_a_model_with_a_system_prompt(client: ollama.Client) -> None:
    statuses = [
        progress.status
        for progress in client.create("fox", from_="tiny", system="You are a fox.", parameters=GREEDY, stream=True)
    ]
    assert statuses[-1] == "success"
    plain, fox = client.chat("tiny", HELLO, options=GREEDY), client.chat("fox", HELLO)
    assert fox.prompt_eval_count is not None
    assert plain.prompt_eval_count is not None
    assert fox.prompt_eval_count > plain.prompt_eval_count
    assert fox.eval_count is not None
    assert fox.eval_count <= 8
    shown = client.show("fox")
    assert shown.modelfile is not None
    assert 'SYSTEM """You are a fox."""' in shown.modelfile
    assert shown.details is not None
    assert shown.details.parent_model == "tiny"
    assert client.delete("fox").status == "success"
    assert names(client) == ["tiny:latest"]


def test_copies(client: ollama.Client) -> None:
    assert client.copy("tiny", "twin:v2").status == "success"
    assert names(client) == ["tiny:latest", "twin:v2"]
    assert client.chat("twin:v2", HELLO, options=GREEDY).message == client.chat("tiny", HELLO, options=GREEDY).message
    client.delete("twin:v2")


def test_uploaded_and_quantized(client: ollama.Client, f16: Path) -> None:
    digest = client.create_blob(f16)
    told = list(client.create("small", files={"f16.gguf": digest}, quantize="q4_K_M", stream=True))
    assert any(progress.completed and progress.total for progress in told)
    details = client.show("small").details
    assert details is not None
    assert details.quantization_level == "Q4_K_M"
    assert client.generate("small", "Hello", options=GREEDY).done
    client.delete("small")
    with pytest.raises(ollama.ResponseError) as caught:
        client.show("small")
    assert caught.value.status_code == 404


def test_an_adapter_takes_effect(client: ollama.Client, daemon: Daemon, tmp_path: Path) -> None:
    lora = write_lora(builtin.model_path(), tmp_path / "lora.gguf")
    digest = client.create_blob(lora)
    assert client.create("tuned", from_="tiny", adapters={"lora.gguf": digest}).status == "success"
    plain = client.generate("tiny", "Tell me a story", options=GREEDY).response
    tuned = client.generate("tuned", "Tell me a story", options=GREEDY).response
    engines = {row["backend"] for row in daemon.http.get("/localrun/v1/snapshot").json()["engines"]}
    assert len(client.ps().models) == 2
    if not any("fake" in backend for backend in engines):
        assert plain != tuned
    client.delete("tuned")
    assert len(client.ps().models) == 1


def test_refusals(client: ollama.Client) -> None:
    for call, status in (
        (lambda: client.create("x", from_="/nothing.gguf"), 404),
        (lambda: client.create("x", from_="tiny", template="{% if %}"), 422),
        (lambda: client.create("../x", from_="tiny"), 400),
        (lambda: client.copy("nothing", "x"), 404),
        (lambda: client.delete("nothing"), 404),
        (lambda: client.delete("tiny"), 400),
        (lambda: client.push("tiny"), 501),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status
        assert caught.value.error
