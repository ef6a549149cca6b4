"""The official `anthropic` client against a real daemon: messages, streams, tools, counts, errors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx2
import pydantic
import pytest

from tests.daemon import Daemon
from tests.server.media import making

MESSAGES: Any = [{"role": "user", "content": "Hello! Who are you?"}]
# The client knows these fields no more; models do.
GREEDY = {"temperature": 0, "top_k": 5, "top_p": 0.9}
ASKED: Any = {"role": "user", "content": "Is it warm in Paris?"}


class Look(pydantic.BaseModel):
    """Every value is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    scale: Literal["C", "F"]


TOOL: Any = {"name": "look", "description": "Looks the weather up.", "input_schema": Look.model_json_schema()}


@pytest.fixture
def client(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=daemon.url, api_key="unused", max_retries=0, http_client=httpx2.Client(trust_env=False)
    ) as connected:
        yield connected


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="tiny", messages=MESSAGES, max_tokens=12, extra_body=GREEDY, system="Be brief.",
        metadata={"user_id": "somebody"}, stop_sequences=["no such text"],
    )  # fmt: skip
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert text_of(message)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 12
    assert message._request_id


def test_a_stream_adds_up(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    n_prompt = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == n_prompt
    kinds = [event.type for event in client.messages.create(stream=True, **asked)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_tool_loop(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="tiny", messages=[ASKED], max_tokens=300, extra_body=GREEDY, tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    (call,) = message.content
    assert call.type == "tool_use"
    assert (message.stop_reason, call.name) == ("tool_use", "look")
    Look.model_validate(call.input)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "22 degrees"}]}
    answered: Any = [ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(
        model="tiny", messages=answered, max_tokens=12, extra_body=GREEDY, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert text_of(after)
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > 30


def test_the_sdk_s_own_accumulator_parses_a_streamed_call(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="tiny", messages=[ASKED], max_tokens=300, extra_body=GREEDY, tools=[TOOL],
        tool_choice={"type": "tool", "name": "look"},
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"input_json", "content_block_stop", "message_stop"} <= kinds
    calls = [block for block in final.content if block.type == "tool_use"]
    assert calls
    Look.model_validate(calls[0].input)


def test_structured_output(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model="tiny", messages=[ASKED], max_tokens=300, extra_body=GREEDY, output_format=Look
    ).parsed_output
    assert isinstance(parsed, Look)


def test_counted_tokens(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "system": "Be brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked).input_tokens
    beta = client.beta.messages.count_tokens(betas=["token-counting-2024-11-01"], **asked).input_tokens
    usage = client.messages.create(max_tokens=1, **asked).usage
    assert counted == beta == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_betas_and_cache_control_are_no_obstacle(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief. " * 10, "cache_control": {"type": "ephemeral"}}]
    asked: Any = {"model": "tiny", "messages": MESSAGES, "system": system, "max_tokens": 4}
    client.beta.messages.create(betas=["some-beta-2031-01-01"], thinking={"type": "adaptive"}, **asked)
    again = client.beta.messages.create(betas=["some-beta-2031-01-01"], **asked)
    assert again.usage.cache_read_input_tokens is not None


def test_the_models(client: anthropic.Anthropic) -> None:
    assert "tiny" in [model.id for model in client.models.list()]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_are_the_sdk_s_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        client.messages.create(model="no-such-model", messages=MESSAGES, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        client.messages.create(
            model="tiny", messages=MESSAGES, max_tokens=5, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    image: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(making.png()).decode()},
    }
    with pytest.raises(anthropic.BadRequestError, match="images") as caught:
        client.messages.create(model="tiny", messages=[{"role": "user", "content": [image]}], max_tokens=5)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"


def test_a_stream_that_is_left_is_cancelled(client: anthropic.Anthropic, daemon: Daemon) -> None:
    with client.messages.stream(model="tiny", messages=MESSAGES, max_tokens=1000) as stream:
        next(iter(stream))
        request_id = stream.response.headers["request-id"]
    row = daemon.http.get(f"/localrun/v1/requests/{request_id}").json()
    assert row["output_tokens"] <= 1000


async def test_the_async_client(daemon: Daemon) -> None:
    async with (
        anthropic.AsyncAnthropic(
            base_url=daemon.url, auth_token="unused", http_client=httpx2.AsyncClient(trust_env=False)
        ) as client,
        client.messages.stream(model="tiny", messages=MESSAGES, max_tokens=8, extra_body=GREEDY) as stream,
    ):
        assert [text async for text in stream.text_stream]
