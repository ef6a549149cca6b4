"""`litellm`, by which aider and many others speak: all its ways to an Ollama, and the OpenAI and Anthropic ones."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

# The prices of models that are not asked here would be fetched from afar.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import (
    FAKE_URL,
    PICTURE_URI,
    QUESTION,
    SCHEMA,
    URL,
    assert_cancelled,
    long_reply,
    raises,
    run,
    says,
    says_call,
)

litellm.telemetry = False
litellm.num_retries = 0
TOOL: Any = {"type": "function", "function": {"name": "look", "description": "Weather.", "parameters": SCHEMA}}
WAYS: dict[str, dict[str, str]] = {
    "ollama_chat/": {"path": ""},
    "ollama/": {"path": ""},
    "openai/": {"path": "/v1", "api_key": "unused"},
    "anthropic/": {"path": "", "api_key": "unused"},
}


def ask(way: str, model: str, content: Any, *, url: str = FAKE_URL, **fields: Any) -> Any:
    target = dict(WAYS[way])
    return litellm.completion(
        model=way + model, api_base=url + target.pop("path"), messages=[{"role": "user", "content": content}],
        **target, **fields,
    )  # fmt: skip


def check_chat() -> None:
    for way in WAYS:
        answer = ask(way, "tiny", QUESTION, url=URL, max_tokens=8, temperature=0)
        assert answer.choices[0].message.content, way
        assert answer.usage.prompt_tokens, way
        assert 0 < answer.usage.completion_tokens <= 8, way


def check_stream() -> None:
    for way in ("ollama_chat/", "openai/", "anthropic/"):
        chunks = list(ask(way, "caller", says("some words"), stream=True, max_tokens=100))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "some words", way
        assert chunks[-1].choices[0].finish_reason == "stop", way
    assert list(ask("ollama/", "tiny", QUESTION, url=URL, stream=True, max_tokens=8))


def check_context_of_each_request() -> None:
    """As aider does it: another `num_ctx` for every request loads nothing again."""
    for n_ctx in (9000, 9100, 8200):
        answer = ask("ollama_chat/", "caller", says("fine"), num_ctx=n_ctx, extra_headers={"x-client": "aider"})
        assert answer.choices[0].message.content == "fine"


def check_tools() -> None:
    for way in ("ollama_chat/", "openai/", "anthropic/"):
        prompt = says_call("look", {"city": "Paris", "warm": True})
        answer = ask(way, "caller", prompt, tools=[TOOL], max_tokens=200)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "look", way
        assert json.loads(call.function.arguments) == {"city": "Paris", "warm": True}, way
        assert answer.choices[0].finish_reason == "tool_calls", way
        target = dict(WAYS[way])
        after = litellm.completion(
            model=f"{way}caller", api_base=FAKE_URL + target.pop("path"), tools=[TOOL], max_tokens=200, **target,
            messages=[
                {"role": "user", "content": prompt},
                answer.choices[0].message,
                {"role": "tool", "tool_call_id": call.id, "name": "look", "content": says("It is warm.")},
            ],
        )  # fmt: skip
        assert after.choices[0].message.content == "It is warm.", way


def check_streamed_tools() -> None:
    for way in ("ollama_chat/", "openai/", "anthropic/"):
        prompt = says_call("look", {"city": "London", "warm": False})
        chunks = list(ask(way, "caller", prompt, tools=[TOOL], max_tokens=200, stream=True))
        (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"city": "London", "warm": False})


def check_structured_output() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    for way in ("ollama_chat/", "ollama/", "openai/"):
        answer = ask(way, "tiny", QUESTION, url=URL, response_format=wanted, temperature=0)
        assert set(json.loads(answer.choices[0].message.content)) == {"city", "warm"}, way


def check_embeddings() -> None:
    for model, base in (("ollama/bert", URL), ("openai/bert", f"{URL}/v1")):
        answer = litellm.embedding(model=model, input=["the cat", "the dog"], api_base=base, api_key="unused")
        assert [len(row["embedding"]) for row in answer.data] == [64, 64], model
        assert answer.usage.prompt_tokens, model


def check_responses() -> None:
    answer = litellm.responses(
        model="openai/caller", input=says("fine"), api_base=f"{FAKE_URL}/v1", api_key="unused", max_output_tokens=50
    )
    assert answer.output[-1].content[0].text == "fine"


def check_completions() -> None:
    answer = litellm.text_completion(
        model="openai/tiny", prompt="Once upon", api_base=f"{URL}/v1", api_key="unused", max_tokens=6
    )
    assert answer.choices[0].text


async def check_cancel() -> None:
    stream = await litellm.acompletion(
        model="openai/caller", api_base=f"{FAKE_URL}/v1", api_key="unused", stream=True,
        messages=[{"role": "user", "content": long_reply()}],
    )  # fmt: skip
    await anext(aiter(stream))
    await stream.aclose()
    await asyncio.to_thread(assert_cancelled, FAKE_URL)


def check_errors() -> None:
    for way, kind in {
        "ollama_chat/": (litellm.APIConnectionError, litellm.NotFoundError),
        "openai/": litellm.NotFoundError,
        "anthropic/": litellm.NotFoundError,
    }.items():
        with raises(kind) as missing:
            ask(way, "nowhere", "x", max_tokens=5)
        assert "nowhere" in str(missing[0]), way
    with raises(litellm.BadRequestError):
        ask("openai/", "tiny", "x", url=URL, temperature=-1)
    with raises(litellm.ContextWindowExceededError):
        ask("openai/", "tiny", "many words " * 9000, url=URL)


def check_picture() -> None:
    what = {"type": "text", "text": "what?"}
    picture = {"type": "image_url", "image_url": {"url": PICTURE_URI}}
    for way in WAYS:
        blind, seeing = (
            ask(way, "gemma3", content, url=URL, max_tokens=4, temperature=0) for content in ([what], [what, picture])
        )
        assert seeing.usage.prompt_tokens > blind.usage.prompt_tokens, way


if __name__ == "__main__":
    run(globals())
