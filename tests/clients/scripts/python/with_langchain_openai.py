"""`langchain-openai`: chat completions and responses, tools, structured output, embeddings, cancelling, errors."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from checks import FAKE_URL, PICTURE_URI, QUESTION, URL, assert_cancelled, long_reply, raises, run, says, says_call
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Weather(BaseModel):
    """Every value of it is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    warm: bool


@tool
def look(city: str, warm: bool) -> str:
    """Look the weather up."""
    return says(f"{city}: {'warm' if warm else 'cold'}")


def real(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="unused", max_retries=0, **fields)


def fake(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model="caller", base_url=f"{FAKE_URL}/v1", api_key="unused", max_retries=0, **fields)


def check_chat() -> None:
    answer = real(max_tokens=8, temperature=0).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] <= 8


def check_stream() -> None:
    for more in ({}, {"use_responses_api": True}):
        chunks = list(fake(stream_usage=True, **more).stream(says("some words")))
        assert "".join(chunk.text for chunk in chunks) == "some words"
        assert any(chunk.usage_metadata for chunk in chunks)


def check_tools() -> None:
    for more in ({}, {"use_responses_api": True}):
        model = fake(**more).bind_tools([look])
        messages: list[Any] = [HumanMessage(says_call("look", {"city": "Paris", "warm": False}))]
        answer = model.invoke(messages)
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("look", {"city": "Paris", "warm": False})
        assert model.invoke([*messages, answer, look.invoke(call)]).text == "Paris: cold"


def check_streamed_tools() -> None:
    whole: Any = None
    for chunk in fake().bind_tools([look]).stream(says_call("look", {"city": "Rome", "warm": True})):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("look", {"city": "Rome", "warm": True})]


def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        wanted = real(temperature=0).with_structured_output(Weather, method=method)
        assert isinstance(wanted.invoke(QUESTION), Weather), method


def check_completions() -> None:
    model = OpenAI(model="tiny", base_url=f"{URL}/v1", api_key="unused", max_tokens=8, temperature=0)
    assert len(model.batch(["Once upon", "There was"])) == 2


def check_embeddings() -> None:
    # Unless told otherwise it sends token ids of a tokenizer that is not the model's.
    embedder = OpenAIEmbeddings(
        model="bert", base_url=f"{URL}/v1", api_key="unused", check_embedding_ctx_length=False, dimensions=16
    )
    assert [len(vector) for vector in embedder.embed_documents(["the cat", "the dog"])] == [16, 16]


async def check_cancel() -> None:
    stream = fake().astream(long_reply())
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(assert_cancelled, FAKE_URL)


def check_errors() -> None:
    with raises(openai.NotFoundError):
        ChatOpenAI(model="nowhere", base_url=f"{URL}/v1", api_key="unused").invoke("x")
    with raises(openai.BadRequestError) as bad:
        real(temperature=-1).invoke("x")
    assert bad[0].param == "temperature"


def check_picture() -> None:
    picture = {"type": "image_url", "image_url": {"url": PICTURE_URI}}
    for more in ({}, {"use_responses_api": True}):
        model = ChatOpenAI(model="gemma3", base_url=f"{URL}/v1", api_key="unused", max_retries=0, max_tokens=4, **more)
        blind, seeing = (
            model.invoke([HumanMessage([{"type": "text", "text": "what?"}, *pictures])]) for pictures in ([], [picture])
        )
        assert blind.usage_metadata is not None
        assert seeing.usage_metadata is not None
        assert seeing.usage_metadata["input_tokens"] > blind.usage_metadata["input_tokens"]


if __name__ == "__main__":
    run(globals())
