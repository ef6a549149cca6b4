"""Tools, formats, thinking and prompts with the official `ollama` client against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import ollama
import pydantic
import pytest

from tests.daemon import Daemon
from tests.server.media import making

ASKED = {"role": "user", "content": "Is it warm in Paris?"}
OPTIONS = {"temperature": 0, "num_predict": 300}
FEW = {"temperature": 0, "num_predict": 8}


class Look(pydantic.BaseModel):
    """Every value is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    scale: Literal["C", "F"]


def look(city: str, scale: str) -> str:
    """Look the weather up.

    Args:
      city: Where.
      scale: C or F.
    """
    return f"22 {scale} in {city}"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ollama.Client]:
    connected = ollama.Client(host=daemon.url, trust_env=False)
    yield connected
    connected._client.close()


def test_a_schema_of_pydantic_holds_the_answer(client: ollama.Client) -> None:
    schema = Look.model_json_schema()
    answer = client.chat("tiny", [ASKED], format=schema, options=OPTIONS)
    Look.model_validate_json(answer.message.content or "")
    parts = client.chat("tiny", [ASKED], format=schema, options=OPTIONS, stream=True)
    Look.model_validate_json("".join(part.message.content or "" for part in parts))
    generated = client.generate("tiny", "Is it warm in Paris?", format=schema, options=OPTIONS)
    Look.model_validate_json(generated.response)


def test_json_is_an_object(client: ollama.Client) -> None:
    answer = client.chat("tiny", [ASKED], format="json", options=FEW)
    assert (answer.message.content or "").lstrip().startswith("{")


def test_a_function_of_python_is_a_tool(client: ollama.Client) -> None:
    plain = client.chat("tiny", [ASKED], options=FEW)
    answer = client.chat("tiny", [ASKED], tools=[look], options=FEW)
    assert answer.prompt_eval_count is not None
    assert plain.prompt_eval_count is not None
    assert answer.prompt_eval_count > plain.prompt_eval_count


def test_a_call_that_must_be_made(client: ollama.Client) -> None:
    # The client itself has no field for it.
    tool = {"type": "function", "function": {"name": "look", "parameters": Look.model_json_schema()}}
    body = {"model": "tiny", "messages": [ASKED], "tools": [tool], "tool_choice": "required", "options": OPTIONS}
    answer = client._request(ollama.ChatResponse, "POST", "/api/chat", json=body | {"stream": False})
    assert answer.message.tool_calls
    called: dict[str, Any] = dict(answer.message.tool_calls[0].function.arguments)
    Look.model_validate(called)
    parts = list(client._request(ollama.ChatResponse, "POST", "/api/chat", json=body | {"stream": True}, stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert dict(calls[0].function.arguments) == called
    assert all(part.message.role == "assistant" for part in parts)
    result = {"role": "tool", "tool_name": "look", "content": look(**called)}
    after = client.chat("tiny", [ASKED, answer.message, result], tools=[look], options=FEW)
    assert after.prompt_eval_count is not None
    assert answer.prompt_eval_count is not None
    assert after.prompt_eval_count > answer.prompt_eval_count - 200
    assert after.done


def test_thinking_and_images_are_refused_where_there_are_none(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not support thinking") as caught:
        client.chat("tiny", [ASKED], think=True)
    assert caught.value.status_code == 400
    assert client.chat("tiny", [ASKED], think=False, options=FEW).message.thinking is None
    with pytest.raises(ollama.ResponseError, match="does not support images"):
        client.generate("tiny", "What is it?", images=[making.png()])
    with pytest.raises(ollama.ResponseError, match="suffix"):
        client.generate("tiny", "def f(", suffix="return x")


def test_prompts_of_ones_own(client: ollama.Client) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    templated = client.generate("tiny", "hello", system="be brief", template=template, options=FEW)
    raw = client.generate("tiny", "[be brief][hello]", raw=True, options=FEW)
    assert templated.response == raw.response
    assert templated.prompt_eval_count == raw.prompt_eval_count
    assert raw.context is None


def test_a_schema_with_a_slip(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'requred'") as caught:
        client.chat("tiny", [ASKED], format={"type": "object", "requred": ["a"]})
    assert caught.value.status_code == 400
