"""The `ollama` package: chat, streams, tools, structured output, embeddings, cancelling, errors."""

from __future__ import annotations

import base64
import json

import ollama
from checks import (
    FAKE_URL,
    PICTURE,
    QUESTION,
    SCHEMA,
    SOUND,
    URL,
    assert_cancelled,
    long_reply,
    raises,
    run,
    says,
    says_call,
)

real, fake = ollama.Client(URL), ollama.Client(FAKE_URL)
GREEDY = {"temperature": 0, "num_predict": 16}


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def look(city: str, warm: bool = True) -> str:
    """Look the weather up.

    Args:
        city: Where.
        warm: Whether it should be.
    """
    return f"{city}: {'warm' if warm else 'cold'}"


def check_models() -> None:
    listed = {model.model: model for model in real.list().models}
    assert {"tiny", "bert", "caller"} <= {(name or "").removesuffix(":latest") for name in listed}
    assert len({model.digest for model in listed.values()}) == len(listed), "models that differ have digests that do"
    for name in listed:
        shown = real.show(name or "")
        assert shown.modelinfo
        assert shown.details is not None
        assert shown.details.format == "gguf"
    assert "tools" in (real.show("caller").capabilities or [])
    assert real.show("bert").capabilities == ["embedding"]


def check_chat() -> None:
    answer = real.chat("tiny", user(QUESTION), options=GREEDY)
    assert answer.message.content
    assert answer.done_reason in ("stop", "length")
    assert answer.prompt_eval_count
    assert answer.eval_count


def check_stream() -> None:
    parts = list(real.chat("tiny", user(QUESTION), options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == real.chat(
        "tiny", user(QUESTION), options=GREEDY
    ).message.content  # fmt: skip
    assert all(part.message.role == "assistant" for part in parts)
    assert [part.done for part in parts].count(True) == 1


def check_generate() -> None:
    whole = real.generate("tiny", "Once upon", raw=True, options=GREEDY)
    parts = real.generate("tiny", "Once upon", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == whole.response


def check_tools() -> None:
    messages: list[object] = [*user(says_call("look", {"city": "Paris", "warm": False}))]
    answer = fake.chat("caller", messages, tools=[look])
    (call,) = answer.message.tool_calls or []
    assert call.function.name == "look"
    assert call.function.arguments == {"city": "Paris", "warm": False}
    messages += [
        answer.message,
        {"role": "tool", "tool_name": "look", "content": says(look(**call.function.arguments))},
    ]
    assert fake.chat("caller", messages, tools=[look]).message.content == "Paris: cold"


def check_streamed_tools() -> None:
    parts = list(
        fake.chat("caller", user(says_call("look", {"city": "Rome", "warm": True})), tools=[look], stream=True)
    )
    calls = [call for part in parts for call in part.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("look", {"city": "Rome", "warm": True})
    ]
    assert "tool_call" not in "".join(part.message.content or "" for part in parts)


def check_structured_output() -> None:
    answer = real.chat("tiny", user(QUESTION), format=SCHEMA, options={"temperature": 0})
    assert set(json.loads(answer.message.content or "")) == {"city", "warm"}
    streamed = real.chat("tiny", user(QUESTION), format=SCHEMA, options={"temperature": 0}, stream=True)
    assert "".join(part.message.content or "" for part in streamed) == answer.message.content


def check_embeddings() -> None:
    answer = real.embed("bert", ["the cat", "the dog"])
    assert [len(vector) for vector in answer.embeddings] == [64, 64]
    assert len(real.embed("bert", "the cat", dimensions=16).embeddings[0]) == 16
    assert len(real.embeddings("bert", "the cat").embedding) == 64


def check_cancel() -> None:
    stream = fake.chat("caller", user(long_reply()), stream=True)
    next(iter(stream))
    stream.close()
    assert_cancelled(FAKE_URL)


def check_errors() -> None:
    with raises(ollama.ResponseError) as missing:
        real.chat("nowhere", user("x"))
    assert missing[0].status_code == 404
    with raises(ollama.ResponseError) as stream:
        list(real.chat("tiny", user("x"), options={"top_p": 7}, stream=True))
    assert stream[0].status_code == 400
    with raises(ollama.ResponseError) as image:
        real.generate("tiny", "x", images=[b"no image"])
    assert image[0].status_code == 400


async def check_async() -> None:
    client = ollama.AsyncClient(FAKE_URL)
    parts = [part async for part in await client.chat("caller", user(says("two words")), stream=True)]
    assert "".join(part.message.content or "" for part in parts) == "two words"


def check_picture() -> None:
    assert "vision" in (real.show("gemma3").capabilities or ())
    blind, seeing = (
        real.chat("gemma3", [{"role": "user", "content": "what?", "images": images}], options=GREEDY)
        for images in ([], [base64.b64decode(PICTURE)])
    )
    assert (seeing.prompt_eval_count or 0) > (blind.prompt_eval_count or 0)
    generated = real.generate("gemma3", "what?", images=[PICTURE], options=GREEDY)
    assert generated.prompt_eval_count == seeing.prompt_eval_count


def check_sound() -> None:
    assert "audio" in (real.show("ultravox").capabilities or ())
    answer = real.generate("ultravox", "what?", images=[base64.b64decode(SOUND)], options=GREEDY)
    assert (answer.prompt_eval_count or 0) > 375


if __name__ == "__main__":
    run(globals())
