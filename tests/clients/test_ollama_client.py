"""The official `ollama` client against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import pytest

from tests.clients.conftest import IS_DOOR
from tests.daemon import Daemon

MESSAGES = [{"role": "user", "content": "Hello! Who are you?"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ollama.Client]:
    connected = ollama.Client(host=daemon.url, trust_env=False)
    yield connected
    connected._client.close()


def test_list(client: ollama.Client) -> None:
    model = client.list().models[0]
    assert model.model == "tiny:latest"
    assert model.size is not None
    assert model.size > 1_000_000
    assert model.modified_at is not None
    assert model.modified_at.year >= 2020
    assert model.details is not None
    assert (model.details.format, model.details.family) == ("gguf", "llama")


def test_show(client: ollama.Client) -> None:
    shown = client.show("tiny")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 4096
    assert shown.template
    assert "<|im_start|>" in shown.template


def test_chat(client: ollama.Client) -> None:
    answer = client.chat("tiny", MESSAGES, options=GREEDY)
    assert answer.message.role == "assistant"
    assert answer.message.content
    assert answer.done
    assert answer.done_reason in ("stop", "length")
    assert answer.prompt_eval_count
    assert answer.eval_count
    assert answer.eval_duration
    assert answer.created_at


def test_a_streamed_chat_adds_up(client: ollama.Client) -> None:
    parts = list(client.chat("tiny", MESSAGES, options=GREEDY, stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (
        "".join(part.message.content or "" for part in parts)
        == client.chat("tiny", MESSAGES, options=GREEDY).message.content
    )
    assert parts[-1].eval_count
    assert parts[-1].eval_count <= 12


def test_generate_and_continue(client: ollama.Client) -> None:
    first = client.generate("tiny", "Hello", options=GREEDY)
    assert first.response
    assert first.context
    second = client.generate("tiny", "And then?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count is not None
    assert second.prompt_eval_count > len(first.context)
    streamed = client.generate("tiny", "Hello", options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in streamed) == first.response


def test_logprobs(client: ollama.Client) -> None:
    answer = client.chat("tiny", MESSAGES, options=GREEDY, logprobs=True, top_logprobs=2)
    assert answer.logprobs
    assert all(entry.logprob <= 0 for entry in answer.logprobs)
    assert answer.logprobs[0].top_logprobs is not None
    assert len(answer.logprobs[0].top_logprobs) == 2


def test_load_ps_and_unload(client: ollama.Client) -> None:
    assert client.generate("tiny", keep_alive="5m").done_reason == "load"
    running = client.ps().models[0]
    assert running.model == "tiny:latest"
    assert running.context_length
    assert running.expires_at is not None
    if IS_DOOR:  # others use it, too
        with pytest.raises(ollama.ResponseError, match="no request unloads it"):
            client.generate("tiny", keep_alive=0)
        return
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    assert list(client.ps().models) == []


def test_pull_of_a_model_that_is_here(client: ollama.Client) -> None:
    assert client.pull("tiny").status == "success"
    assert [part.status for part in client.pull("tiny", stream=True)] == ["success"]


def test_an_unknown_model_is_a_response_error(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no-such-model") as caught:
        client.chat("no-such-model", MESSAGES)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as streamed:
        list(client.chat("no-such-model", MESSAGES, stream=True))
    assert streamed.value.status_code == 404


def test_a_bad_option_is_a_response_error(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p") as caught:
        client.chat("tiny", MESSAGES, options={"top_p": 7})
    assert caught.value.status_code == 400


async def test_the_async_client(daemon: Daemon) -> None:
    client = ollama.AsyncClient(host=daemon.url, trust_env=False)
    text = ""
    async for part in await client.chat("tiny", MESSAGES, options=GREEDY, stream=True):
        text += part.message.content or ""
    assert text
    await client._client.aclose()
