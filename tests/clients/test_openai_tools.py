"""Tools with the official `openai` client against a real daemon: the loop that an agent runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.daemon import Daemon

ASKED: ChatCompletionMessageParam = {"role": "user", "content": "Is it warm in Paris?"}


class Look(pydantic.BaseModel):
    """Looks the weather up. Every value is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    scale: Literal["C", "F"]


TOOL: Any = openai.pydantic_function_tool(Look, name="look")
FLAT: Any = {"type": "function"} | TOOL["function"]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=daemon.url + "/v1", api_key="unused", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as connected:
        yield connected


def test_a_call_and_its_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[ASKED], tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "look"
    Look.model_validate_json(call.function.arguments)
    answered: list[Any] = [ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 22}'}]
    after = client.chat.completions.create(
        model="tiny", messages=answered, tools=[TOOL], tool_choice="none", max_tokens=12, temperature=0
    )
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None


def test_the_sdk_s_own_accumulator_parses_a_streamed_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=[ASKED], tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}},
        parallel_tool_calls=False, temperature=0,
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, Look)


def test_a_response_that_calls(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="Is it warm in Paris?", tools=[FLAT], tool_choice="required", parallel_tool_calls=False,
        temperature=0,
    ) as stream:  # fmt: skip
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        response = stream.get_final_response()
    call = response.output[0]
    assert call.type == "function_call"
    assert call.arguments == arguments
    assert json.loads(arguments).keys() == {"city", "scale"}
    after = client.responses.create(
        model="tiny", previous_response_id=response.id, max_output_tokens=12,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}],
    )  # fmt: skip
    assert after.usage is not None
    assert response.usage is not None
    assert after.usage.input_tokens > 20
    # The same conversation, sent whole, as clients do that keep it themselves.
    stateless: list[Any] = [
        ASKED,
        *(item.model_dump(exclude_none=True) for item in response.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"},
    ]
    whole = client.responses.create(model="tiny", input=stateless, max_output_tokens=12, store=False)
    assert whole.usage is not None
    assert whole.usage.input_tokens == after.usage.input_tokens
