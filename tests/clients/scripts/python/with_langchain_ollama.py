"""`langchain-ollama`: chat, streams, tools, structured output, embeddings, cancelling, errors."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import ollama
from checks import FAKE_URL, PICTURE_URI, QUESTION, URL, assert_cancelled, long_reply, raises, run, says, says_call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel


class Weather(BaseModel):
    """Every value of it is short, so that the smallest model comes to an end."""

    city: Literal["Paris", "London"]
    warm: bool


@tool
def look(city: str, warm: bool) -> str:
    """Look the weather up."""
    return says(f"{city}: {'warm' if warm else 'cold'}")


def real(**fields: Any) -> ChatOllama:
    return ChatOllama(model="tiny", base_url=URL, temperature=0, **fields)


def fake(**fields: Any) -> ChatOllama:
    return ChatOllama(model="caller", base_url=FAKE_URL, **fields)


def check_models() -> None:
    real(validate_model_on_init=True)
    with raises(ValueError) as missing:
        ChatOllama(model="nowhere", base_url=URL, validate_model_on_init=True)
    assert "nowhere" in str(missing[0])


def check_chat() -> None:
    answer = real(num_predict=8).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] <= 8
    assert answer.response_metadata["done_reason"] in ("stop", "length")


def check_stream() -> None:
    chunks = list(fake().stream(says("some words")))
    assert "".join(str(chunk.content) for chunk in chunks) == "some words"
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1


def check_logprobs() -> None:
    answer = real(num_predict=4, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]


def check_generate() -> None:
    text = OllamaLLM(model="tiny", base_url=URL, temperature=0, num_predict=8).invoke("Once upon a time")
    assert text


def check_tools() -> None:
    model = fake().bind_tools([look])
    messages: list[Any] = [HumanMessage(says_call("look", {"city": "Paris", "warm": False}))]
    answer = model.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("look", {"city": "Paris", "warm": False})
    result = look.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.invoke([*messages, answer, result]).content == "Paris: cold"


def check_streamed_tools() -> None:
    model = fake().bind_tools([look])
    whole: Any = None
    for chunk in model.stream(says_call("look", {"city": "Rome", "warm": True})):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("look", {"city": "Rome", "warm": True})]


def check_structured_output() -> None:
    assert isinstance(real().with_structured_output(Weather).invoke(QUESTION), Weather)
    fields = says_call("Weather", {"city": "Paris", "warm": True})
    assert fake().with_structured_output(Weather, method="function_calling").invoke(fields) == Weather(
        city="Paris", warm=True
    )


def check_embeddings() -> None:
    embedder = OllamaEmbeddings(model="bert", base_url=URL)
    assert [len(vector) for vector in embedder.embed_documents(["the cat", "the dog"])] == [64, 64]
    assert len(embedder.embed_query("the cat")) == 64


async def check_cancel() -> None:
    stream = fake().astream(long_reply())
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(assert_cancelled, FAKE_URL)


def check_errors() -> None:
    with raises(ollama.ResponseError) as missing:
        ChatOllama(model="nowhere", base_url=URL).invoke("x")
    assert missing[0].status_code == 404
    with raises(ollama.ResponseError) as bad:
        real(top_p=7).invoke("x")
    assert "top_p" in bad[0].error


def check_picture() -> None:
    model = ChatOllama(model="gemma3", base_url=URL, num_predict=4)
    picture = {"type": "image_url", "image_url": {"url": PICTURE_URI}}
    blind, seeing = (
        model.invoke([HumanMessage([{"type": "text", "text": "what?"}, *pictures])]) for pictures in ([], [picture])
    )
    assert blind.usage_metadata is not None
    assert seeing.usage_metadata is not None
    assert seeing.usage_metadata["input_tokens"] > blind.usage_metadata["input_tokens"]


if __name__ == "__main__":
    run(globals())
