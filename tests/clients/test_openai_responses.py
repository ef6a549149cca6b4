"""The official `openai` client's responses against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from localrun.errors import NotFound
from tests.daemon import Daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=daemon.url + "/v1", api_key="unused", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as connected:
        yield connected


def test_create(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny", input="Hello! Who are you?", instructions="Answer in one sentence.", max_output_tokens=12,
        temperature=0,
    )  # fmt: skip
    assert response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage is not None
    assert 0 < response.usage.output_tokens <= 12
    assert response.instructions == "Answer in one sentence."


def test_a_stream_adds_up(client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model="tiny", input="Hello! Who are you?", max_output_tokens=12, temperature=0, stream=True
    )
    told = list(stream)
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert [event.type for event in told[:2]] == ["response.created", "response.in_progress"]
    text = "".join(event.delta for event in told if event.type == "response.output_text.delta")
    last = told[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert isinstance(
        last, openai.types.responses.ResponseCompletedEvent | openai.types.responses.ResponseIncompleteEvent
    )
    assert last.response.output_text == text
    whole = client.responses.create(model="tiny", input="Hello! Who are you?", max_output_tokens=12, temperature=0)
    assert whole.output_text == text


def test_the_sdk_s_own_accumulator_accepts_the_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Hello! Who are you?", temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == deltas
    assert final.status == "completed"


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="Hello!", max_output_tokens=8)
    second = client.responses.create(
        model="tiny", input="And then?", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens - 2
    assert client.responses.retrieve(second.id).output == second.output
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"] * 3
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(second.id)
    assert gone.value.code == NotFound.code


class Weather(pydantic.BaseModel):
    """Every value of it is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    is_warm: bool


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model="tiny", input="What is the weather in Paris?", text_format=Weather, temperature=0
    )
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Weather)


async def test_the_async_client(daemon: Daemon) -> None:
    async with openai.AsyncOpenAI(
        base_url=daemon.url + "/v1", api_key="unused", http_client=httpx.AsyncClient(trust_env=False)
    ) as client:
        stream = await client.responses.create(model="tiny", input="Hello", max_output_tokens=8, stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")
