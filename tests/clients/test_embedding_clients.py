"""The official `openai` and `ollama` clients ask for embeddings: real weights, of an encoder and of a decoder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from tests.daemon import Daemon, running_daemon
from tests.models.synthesize_embedding import synthesize_embedding

TEXTS = ["the cat and the dog went home", "what is the time?", "the cat and the dog went away"]


@pytest.fixture(scope="module")
def embedding_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder: Path = tmp_path_factory.mktemp("models")
    synthesize_embedding("tiny-bert", folder / "bert.gguf")
    synthesize_embedding("tiny-qwen3-embedding", folder / "qwen.gguf")
    with running_daemon(fake=False, LOCALRUN_MODELS=str(folder)) as running:
        yield running


@pytest.fixture
def openai_client(embedding_daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=embedding_daemon.url + "/v1", api_key="unused", max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as connected:  # fmt: skip
        yield connected


@pytest.fixture
def ollama_client(embedding_daemon: Daemon) -> Iterator[ollama.Client]:
    connected = ollama.Client(embedding_daemon.url, trust_env=False)
    yield connected
    connected._client.close()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    lengths = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths


@pytest.mark.parametrize("model", ["bert", "qwen"])
def test_both_clients_get_the_same_vectors(
    model: str, openai_client: openai.OpenAI, ollama_client: ollama.Client
) -> None:
    # The SDK asks for base64 unless told otherwise, and decodes it.
    answer = openai_client.embeddings.create(model=model, input=TEXTS)
    floats = openai_client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    theirs = ollama_client.embed(model=model, input=TEXTS)
    assert answer.usage.prompt_tokens == theirs.prompt_eval_count
    for packed, listed, other in zip(answer.data, floats.data, theirs.embeddings, strict=True):
        assert len(packed.embedding) == 64
        assert listed.embedding == pytest.approx(packed.embedding, abs=1e-6)
        assert cosine(packed.embedding, other) == pytest.approx(1, abs=1e-6)
    near, far = (cosine(answer.data[0].embedding, answer.data[at].embedding) for at in (2, 1))
    assert near > far, "texts that share most words are nearer, even for random weights"


def test_dimensions(openai_client: openai.OpenAI, ollama_client: ollama.Client) -> None:
    cut = openai_client.embeddings.create(model="bert", input=TEXTS[0], dimensions=16).data[0].embedding
    assert ollama_client.embed(model="bert", input=TEXTS[0], dimensions=16).embeddings[0] == pytest.approx(
        cut, abs=1e-6
    )
    assert sum(value * value for value in cut) == pytest.approx(1, abs=1e-5)


def test_the_legacy_route_of_ollama(ollama_client: ollama.Client) -> None:
    legacy = ollama_client.embeddings(model="bert", prompt=TEXTS[0]).embedding
    assert cosine(legacy, ollama_client.embed(model="bert", input=TEXTS[0]).embeddings[0]) == pytest.approx(1, abs=1e-6)


def test_truncation(ollama_client: ollama.Client, openai_client: openai.OpenAI) -> None:
    long = "the river and the sea " * 100
    assert ollama_client.embed(model="bert", input=long).prompt_eval_count == 128
    with pytest.raises(ollama.ResponseError) as refused:
        ollama_client.embed(model="bert", input=long, truncate=False)
    assert refused.value.status_code == 400
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.embeddings.create(model="bert", input=long)
    assert too_long.value.code == "context_length_exceeded"


def test_errors_become_the_sdk_s_exceptions(openai_client: openai.OpenAI, ollama_client: ollama.Client) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.embeddings.create(model="nowhere", input="x")
    with pytest.raises(openai.BadRequestError) as chat:
        openai_client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "x"}])
    assert "does not support chat" in chat.value.message
    with pytest.raises(ollama.ResponseError, match="does not support"):
        ollama_client.generate(model="bert", prompt="x")


async def test_the_async_client(embedding_daemon: Daemon) -> None:
    async with openai.AsyncOpenAI(
        base_url=embedding_daemon.url + "/v1", api_key="unused", http_client=httpx.AsyncClient(trust_env=False)
    ) as client:
        answer = await client.embeddings.create(model="qwen", input=[[1, 2, 3], [4, 5]])
    assert [row.index for row in answer.data] == [0, 1]
    assert answer.usage.total_tokens == 5
