"""Chunks of /v1 streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.server.openai import usage as openai_usage
from localrun.server.openai.chunks import ChatChunks, CompletionChunks
from localrun.wire import ChosenLogprob, TokenLogprob, Usage

HALF = ChosenLogprob(7, b"\xc3", -0.5, (TokenLogprob(7, b"\xc3", -0.5), TokenLogprob(8, b"a", -1.0)))
WORD = ChosenLogprob(9, b"word", -0.1, ())


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: {")
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
    parsed: dict[str, Any] = json.loads(data[6:])
    return parsed


def chat(*, include_usage: bool = False) -> ChatChunks:
    return ChatChunks(request_id="1", model='a"b', include_usage=include_usage)


def completions(*echoes: str) -> CompletionChunks:
    return CompletionChunks(request_id="1", model="m", include_usage=False, echoes=echoes)


def test_a_chat_stream() -> None:
    chunks = chat()
    first, text, end = event(chunks.first(0)), event(chunks.text(0, 'é "x"\n')), event(chunks.end(0, "stop", {"t": 1}))
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert text["choices"] == [{"index": 0, "delta": {"content": 'é "x"\n'}, "logprobs": None, "finish_reason": None}]
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert end["t"] == 1
    for chunk in (first, text, end):
        assert (chunk["id"], chunk["object"], chunk["model"]) == ("chatcmpl-1", "chat.completion.chunk", 'a"b')
        assert chunk["created"] == first["created"]
        assert "usage" not in chunk


def test_with_usage_all_chunks_but_the_last_have_none() -> None:
    chunks = chat(include_usage=True)
    logprobs = [HALF]
    for data in (chunks.first(0), chunks.text(0, "x"), chunks.text(0, "x", logprobs), chunks.end(0, "stop", {})):
        assert event(data)["usage"] is None
    last = event(chunks.last({"usage": {"total_tokens": 3}}))
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})


def test_chat_logprobs() -> None:
    choice = event(chat().text(1, "", [HALF, WORD]))["choices"][0]
    assert choice["index"] == 1
    entries = choice["logprobs"]["content"]
    assert entries[0] == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [195],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [195]},
            {"token": "a", "logprob": -1.0, "bytes": [97]},
        ],
    }
    assert entries[1]["token"] == "word"


def test_a_whole_chat() -> None:
    chunks = chat()
    answer = json.loads(chunks.whole([chunks.choice(0, "hi", [], "length")], {"usage": {}}))
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]


def test_a_completion_stream() -> None:
    chunks = completions()
    assert chunks.first(0) == b""
    text = event(chunks.text(0, "x"))
    assert (text["id"], text["object"]) == ("cmpl-1", "text_completion")
    assert text["choices"] == [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}]
    assert event(chunks.end(0, "length", {}))["choices"][0]["text"] == ""


def test_echo_puts_each_prompt_before_its_text() -> None:
    chunks = completions("one ", "two ")
    assert event(chunks.first(1))["choices"][0]["text"] == "two "
    assert chunks.choice(0, "x", [], "stop")["text"] == "one x"


def test_completion_logprobs_count_characters_per_choice() -> None:
    chunks = completions()
    first = chunks.logprobs(0, [WORD, HALF])
    assert first["tokens"] == ["word", "\ufffd"]
    assert first["token_logprobs"] == [-0.1, -0.5]
    assert first["top_logprobs"] == [{}, {"\ufffd": -0.5, "a": -1.0}]
    assert first["text_offset"] == [0, 4]
    assert chunks.logprobs(0, [WORD])["text_offset"] == [5]
    assert chunks.logprobs(1, [WORD])["text_offset"] == [0]


def test_usage_counts_a_prompt_once() -> None:
    def used(n_cached: int) -> Usage:
        return Usage(n_prompt=10, n_cached=n_cached, n_output=3, queued_s=0, prefill_s=0.5, decode_s=0.25)

    choices = [used(4), used(9), used(2), used(9)]
    assert openai_usage.usage(choices[::2], choices) == {
        "prompt_tokens": 20,
        "completion_tokens": 12,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


def test_timings() -> None:
    timings = openai_usage.timings(Usage(n_prompt=10, n_cached=4, n_output=3, queued_s=0, prefill_s=0.5, decode_s=0.25))
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (4, 6, 3)
    assert (timings["prompt_ms"], timings["predicted_ms"]) == (500.0, 250.0)
    assert timings["prompt_per_second"] == pytest.approx(12)
    assert timings["predicted_per_second"] == pytest.approx(8)
    one = openai_usage.timings(Usage(n_prompt=1, n_cached=1, n_output=1, queued_s=0, prefill_s=0, decode_s=0))
    assert one["predicted_per_second"] is None
