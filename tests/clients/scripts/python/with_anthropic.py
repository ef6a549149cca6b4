"""The `anthropic` package: messages, streams, tools, counting, cancelling, errors."""

from __future__ import annotations

from typing import Any

import anthropic
from checks import FAKE_URL, PICTURE, QUESTION, SCHEMA, URL, assert_cancelled, long_reply, raises, run, says, says_call

real = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0)
fake = anthropic.Anthropic(base_url=FAKE_URL, api_key="unused", max_retries=0)
TOOL: Any = {"name": "look", "description": "Look the weather up.", "input_schema": SCHEMA}


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def check_message() -> None:
    answer = real.messages.create(model="tiny", max_tokens=12, messages=user(QUESTION), system="Be kind.")
    assert answer.role == "assistant"
    (block,) = answer.content
    assert block.type == "text"
    assert block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 12


def check_stream() -> None:
    with fake.messages.stream(model="caller", max_tokens=100, messages=user(says("some words"))) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].type == "text"
    assert final.content[0].text == "some words"
    assert final.stop_reason == "end_turn"


def check_tools() -> None:
    messages = user(says_call("look", {"city": "Paris", "warm": True}))
    answer = fake.messages.create(model="caller", max_tokens=200, messages=messages, tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("look", {"city": "Paris", "warm": True})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": says("It is warm.")}]}
    messages += [{"role": "assistant", "content": answer.content}, *user([result])]
    after = fake.messages.create(model="caller", max_tokens=200, messages=messages, tools=[TOOL])
    assert after.content[0].type == "text"
    assert after.content[0].text == "It is warm."


def check_streamed_tools() -> None:
    with fake.messages.stream(
        model="caller",
        max_tokens=200,
        messages=user(says_call("look", {"city": "London", "warm": False})),
        tools=[TOOL],
    ) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "London", "warm": False}]


def check_forced_tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        answer = real.messages.create(
            model="tiny", max_tokens=200, messages=user(QUESTION), tools=[TOOL],
            tool_choice={**choice, "disable_parallel_tool_use": True},
        )  # fmt: skip
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert set(call.input) == {"city", "warm"}


def check_stop_sequences() -> None:
    answer = fake.messages.create(
        model="caller", max_tokens=100, messages=user(says("one two three")), stop_sequences=["two"]
    )
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "two"
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "one "


def check_count_tokens() -> None:
    short = real.messages.count_tokens(model="tiny", messages=user("x"))
    long = real.messages.count_tokens(model="tiny", messages=user("x " * 100), system="Be kind.", tools=[TOOL])
    assert 0 < short.input_tokens < long.input_tokens
    beta = real.beta.messages.count_tokens(model="tiny", messages=user("x"), betas=["token-counting-2024-11-01"])
    assert beta.input_tokens == short.input_tokens
    answer = real.messages.create(model="tiny", max_tokens=1, messages=user("x"))
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) == (
        short.input_tokens
    )


def check_what_is_ignored() -> None:
    marked = [{"type": "text", "text": says("fine"), "cache_control": {"type": "ephemeral"}}]
    answer = fake.beta.messages.create(
        model="caller", max_tokens=50, messages=user(marked), metadata={"user_id": "somebody"},
        betas=["a-beta-that-nobody-knows-2026-01-01"],
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    )  # fmt: skip
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "fine"


def check_models() -> None:
    assert {"tiny", "caller"} <= {model.id.removesuffix(":latest") for model in real.models.list()}


def check_cancel() -> None:
    with fake.messages.stream(model="caller", max_tokens=4000, messages=user(long_reply())) as stream:
        next(iter(stream.text_stream))
    assert_cancelled(FAKE_URL)


def check_errors() -> None:
    with raises(anthropic.NotFoundError) as missing:
        real.messages.create(model="nowhere", max_tokens=1, messages=user("x"))
    assert missing[0].body["error"]["type"] == "not_found_error"
    with raises(anthropic.BadRequestError) as bad:
        real.messages.create(model="tiny", max_tokens=1, messages=user("x"), extra_body={"temperature": -1})
    assert bad[0].body["error"]["type"] == "invalid_request_error"
    assert "temperature" in bad[0].body["error"]["message"]


async def check_async() -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=FAKE_URL, api_key="unused") as client,
        client.messages.stream(model="caller", max_tokens=50, messages=user(says("two words"))) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
    assert text == "two words"


def check_picture() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    messages = user([{"type": "image", "source": source}, {"type": "text", "text": "what?"}])
    answer = real.messages.create(model="gemma3", max_tokens=4, messages=messages)
    counted = real.messages.count_tokens(model="gemma3", messages=messages).input_tokens
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted
    assert counted > real.messages.count_tokens(model="gemma3", messages=user("what?")).input_tokens


if __name__ == "__main__":
    run(globals())
