"""The official `openai` client against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from tests.daemon import Daemon

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=daemon.url + "/v1", api_key="unused", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as connected:
        yield connected


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.prompt_tokens_details is not None


def test_a_repeated_prompt_is_cached(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "system", "content": "You are a friendly helper who answers in short sentences. " * 5},
        *MESSAGES,
    ]
    for _ in range(2):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1


def test_a_streamed_chat_adds_up(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].usage is not None
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    assert text == whole.choices[0].message.content


def test_the_sdk_s_own_accumulator_accepts_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=12, n=2) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    assert [choice.index for choice in final.choices] == [0, 1]
    assert all(choice.finish_reason for choice in final.choices)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert len(logprobs.content[0].top_logprobs) == 2
    assert logprobs.content[0].bytes is not None


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=["Once upon", "There was"],
        max_tokens=8,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].logprobs is not None
    with client.completions.create(
        model="tiny", prompt="Once upon", max_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == answer.choices[0].text


class Weather(pydantic.BaseModel):
    """Every value of it is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    is_warm: bool


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Weather, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_the_best_of_several(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Once upon", max_tokens=8, best_of=4, n=2, seed=1, logprobs=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    means = [
        sum(choice.logprobs.token_logprobs or ()) / len(choice.logprobs.tokens or ())
        for choice in answer.choices
        if choice.logprobs is not None
    ]
    assert len(means) == 2
    assert means == sorted(means, reverse=True), "the most probable one comes first"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32


def test_errors_become_the_sdk_s_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "many words " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model="tiny", input="x")


async def test_the_async_client(daemon: Daemon) -> None:
    async with openai.AsyncOpenAI(
        base_url=daemon.url + "/v1", api_key="unused", http_client=httpx.AsyncClient(trust_env=False)
    ) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text
