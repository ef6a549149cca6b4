"""A real model behind the real daemon, as the official clients see it: every API's chat, a schema, a restart.

What an answer must say is left open, since the models are small. That it is the same on every API, for a question that
every API renders alike, is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import anthropic
import jsonschema
import ollama
import openai
import pytest

from tests.daemon import Daemon, running_daemon
from tests.real import packages

N_TOKENS = 24
MODEL = packages.SMOLLM2.model
SYSTEM = "You are a friendly assistant who answers in full sentences."
QUESTION = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "is_capital"],
    "additionalProperties": False,
}


def serve(home: Path) -> AbstractContextManager[Daemon]:
    """A daemon that finds both models, and keeps what it caches in `home`."""
    folder = packages.model_file(packages.SMOLLM2).parent
    return running_daemon(fake=False, LOCALRUN_HOME=str(home), LOCALRUN_MODEL_DIRS=str(folder))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def ollama_client(daemon: Daemon) -> Iterator[ollama.Client]:
    connected = ollama.Client(host=daemon.url, trust_env=False)
    yield connected
    connected._client.close()


@pytest.fixture(scope="module")
def expected(daemon: Daemon) -> str:
    """Greedy, by Ollama's API without a client."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    options = {"temperature": 0, "num_predict": N_TOKENS}
    done = daemon.post("/api/chat", model=MODEL, messages=messages, options=options, stream=False)
    text = str(done.json()["message"]["content"])
    assert text
    return text


def test_ollama(ollama_client: ollama.Client, expected: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    pieces = ollama_client.chat(MODEL, messages, stream=True, options={"temperature": 0, "num_predict": N_TOKENS})
    assert "".join(piece.message.content or "" for piece in pieces) == expected


def test_openai_chat(daemon: Daemon, expected: str) -> None:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=MODEL, temperature=0, max_tokens=N_TOKENS,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
        )  # fmt: skip
    assert answer.choices[0].message.content == expected
    assert answer.usage
    details = answer.usage.prompt_tokens_details
    assert details
    assert details.cached_tokens


def test_openai_responses(daemon: Daemon, expected: str) -> None:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        answer = client.responses.create(
            model=MODEL, temperature=0, max_output_tokens=N_TOKENS, instructions=SYSTEM, input=QUESTION
        )
    assert answer.output_text == expected


def test_anthropic(daemon: Daemon, expected: str) -> None:
    with (
        anthropic.Anthropic(base_url=daemon.url, api_key="none") as client,
        client.messages.stream(
            model=MODEL, max_tokens=N_TOKENS, system=SYSTEM,
            messages=[{"role": "user", "content": QUESTION}], extra_body={"temperature": 0},
        ) as stream,
    ):  # fmt: skip
        assert "".join(stream.text_stream) == expected


def test_an_answer_that_a_schema_asks_for(daemon: Daemon, ollama_client: ollama.Client) -> None:
    messages = [{"role": "user", "content": "Describe Paris as JSON with its city, country and is_capital."}]
    answers = [ollama_client.chat(MODEL, messages, format=SCHEMA, options={"temperature": 0}).message.content]
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        for seed in range(3):
            done = client.chat.completions.create(
                model=MODEL, temperature=1, seed=seed, messages=messages,  # type: ignore[arg-type]
                response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
            )  # fmt: skip
            answers.append(done.choices[0].message.content)
    for answer in answers:
        jsonschema.validate(json.loads(answer or ""), SCHEMA)


def test_gemma_completes_a_text(daemon: Daemon) -> None:
    """It was not trained to chat and brings no template; the text goes on as it stands."""
    packages.model_file(packages.GEMMA3)
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        done = client.completions.create(
            model=packages.GEMMA3.model, prompt="The capital of France is", temperature=0, max_tokens=8,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    assert done.choices[0].text
    assert done.usage
    assert done.usage.completion_tokens == 8


def test_a_restarted_daemon_goes_on_from_its_disk(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")[:3000]
    body = {"model": MODEL, "prompt": text, "temperature": 0, "max_tokens": N_TOKENS}
    with serve(tmp_path) as first:
        before = first.post("/v1/completions", body).json()
    with serve(tmp_path) as second:
        after = second.post("/v1/completions", body).json()
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= after["usage"]["prompt_tokens"] - 32
    # Its last tokens are computed in another shape; test_greedy.py judges every token of such answers.
    assert after["choices"][0]["text"]
