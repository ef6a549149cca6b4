"""The `openai` package: chat completions, responses, streams, tools, structured output, embeddings, cancelling."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
from checks import (
    FAKE_URL,
    PICTURE_URI,
    QUESTION,
    SOUND,
    URL,
    assert_cancelled,
    long_reply,
    raises,
    run,
    says,
    says_call,
)

real = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0)
fake = openai.OpenAI(base_url=f"{FAKE_URL}/v1", api_key="unused", max_retries=0)


class Look(pydantic.BaseModel):
    """Every value of it is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    warm: bool


TOOL: Any = openai.pydantic_function_tool(Look, name="look")


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def check_models() -> None:
    assert {"tiny", "bert", "caller"} <= {model.id.removesuffix(":latest") for model in real.models.list()}


def check_chat() -> None:
    answer = real.chat.completions.create(model="tiny", messages=user(QUESTION), max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def check_stream() -> None:
    with fake.chat.completions.stream(model="caller", messages=user(says("some words"))) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "some words"
    assert final.choices[0].finish_reason == "stop"


def check_tools() -> None:
    messages = user(says_call("look", {"city": "Paris", "warm": True}))
    answer = fake.chat.completions.create(model="caller", messages=messages, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert Look.model_validate_json(call.function.arguments) == Look(city="Paris", warm=True)
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": says("It is warm.")}]
    after = fake.chat.completions.create(model="caller", messages=messages, tools=[TOOL])
    assert after.choices[0].message.content == "It is warm."


def check_streamed_tools() -> None:
    with fake.chat.completions.stream(
        model="caller", messages=user(says_call("look", {"city": "London", "warm": False})), tools=[TOOL]
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Look(city="London", warm=False)


def check_forced_tools() -> None:
    answer = real.chat.completions.create(
        model="tiny", messages=user(QUESTION), tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    Look.model_validate_json(call.function.arguments)


def check_structured_output() -> None:
    answer = real.chat.completions.parse(model="tiny", messages=user(QUESTION), response_format=Look, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Look)
    plain = real.chat.completions.create(
        model="tiny", messages=user(QUESTION), response_format={"type": "json_object"}, max_tokens=400, temperature=0
    )
    if plain.choices[0].finish_reason == "stop":
        json.loads(plain.choices[0].message.content or "")


def check_responses() -> None:
    with fake.responses.stream(
        model="caller", input=says_call("look", {"city": "Paris", "warm": True}),
        tools=[{"type": "function", **TOOL["function"]}],
    ) as stream:  # fmt: skip
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    call = response.output[-1]
    assert call.type == "function_call"
    after = fake.responses.create(
        model="caller", previous_response_id=response.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": says("It is warm.")}],
    )  # fmt: skip
    assert after.output_text == "It is warm."


def check_embeddings() -> None:
    packed = real.embeddings.create(model="bert", input=["the cat", "the dog"])
    listed = real.embeddings.create(model="bert", input=["the cat", "the dog"], encoding_format="float")
    assert len(packed.data) == 2
    for a, b in zip(packed.data, listed.data, strict=True):
        assert max(abs(x - y) for x, y in zip(a.embedding, b.embedding, strict=True)) < 1e-6


def check_cancel() -> None:
    stream = fake.chat.completions.create(model="caller", messages=user(long_reply()), stream=True)
    next(iter(stream))
    stream.close()
    assert_cancelled(FAKE_URL)
    with raises(openai.APITimeoutError):
        fake.with_options(timeout=0.5).chat.completions.create(model="caller", messages=user(long_reply()))
    assert_cancelled(FAKE_URL)


def check_errors() -> None:
    with raises(openai.NotFoundError) as missing:
        real.chat.completions.create(model="nowhere", messages=user("x"))
    assert missing[0].code == "model_not_found"
    with raises(openai.BadRequestError) as bad:
        real.chat.completions.create(model="tiny", messages=user("x"), temperature=-1, stream=True)
    assert bad[0].param == "temperature"


async def check_async() -> None:
    async with openai.AsyncOpenAI(base_url=f"{FAKE_URL}/v1", api_key="unused") as client:
        stream = await client.chat.completions.create(model="caller", messages=user(says("two words")), stream=True)
        text = "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])
    assert text == "two words"


def check_picture() -> None:
    what: Any = [{"type": "text", "text": "what?"}]
    picture: Any = [{"type": "image_url", "image_url": {"url": PICTURE_URI}}]
    blind, seeing = (
        real.chat.completions.create(model="gemma3", messages=user(content), max_tokens=4, temperature=0)
        for content in (what, what + picture)
    )
    assert blind.usage is not None
    assert seeing.usage is not None
    assert seeing.usage.prompt_tokens > blind.usage.prompt_tokens
    parts: Any = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": PICTURE_URI}]
    response = real.responses.create(model="gemma3", input=user(parts), max_output_tokens=4, temperature=0)
    assert response.usage is not None
    assert response.usage.input_tokens == seeing.usage.prompt_tokens


def check_sound() -> None:
    heard: Any = [{"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}]
    answer = real.chat.completions.create(model="ultravox", messages=user(heard), max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 375


if __name__ == "__main__":
    run(globals())
