"""Counts and rates."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from localrun.server.openai.answer import ChatChunks, timings_of, usage_of
from localrun.wire import ChosenLogprob, DraftCounts, DraftSource, Finish, TokenLogprob, Usage
from tests.server.openai.stub_parser import delta, reply


def test_a_prompt_counts_once_and_of_drafts_the_prediction_alone() -> None:
    drafts = DraftCounts(DraftSource.PREDICTION, 1, 3, 2), DraftCounts(DraftSource.LOOKUP, 4, 40, 30)

    def used(n_cached: int) -> Usage:
        return Usage(
            n_prompt=10, n_cached=n_cached, n_output=3, queued_s=0, prefill_s=0.5, decode_s=0.25, drafts=drafts
        )  # fmt: skip

    choices = [used(4), used(9), used(2), used(9)]
    assert msgspec.to_builtins(usage_of(choices[::2], choices, n_thinking=5)) == {
        "prompt_tokens": 20,
        "completion_tokens": 12,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {
            "reasoning_tokens": 5,
            "accepted_prediction_tokens": 8,
            "rejected_prediction_tokens": 4,
        },
    }


def test_timings() -> None:
    timings = timings_of(Usage(n_prompt=10, n_cached=4, n_output=3, queued_s=0, prefill_s=0.5, decode_s=0.25))
    assert (timings.cache_n, timings.prompt_n, timings.predicted_n) == (4, 6, 3)
    assert (timings.prompt_ms, timings.predicted_ms) == (500.0, 250.0)
    assert timings.prompt_per_second == pytest.approx(12)
    assert timings.predicted_per_second == pytest.approx(8)
    one = timings_of(Usage(n_prompt=1, n_cached=1, n_output=1, queued_s=0, prefill_s=0, decode_s=0))
    assert one.predicted_per_second == 0
    assert "draft_n" not in msgspec.to_builtins(one)


HALF = ChosenLogprob(7, b"\xc3", -0.5, (TokenLogprob(7, b"\xc3", -0.5), TokenLogprob(8, b"a", -1.0)))
WORD = ChosenLogprob(9, b"word", -0.1, ())


def events(data: bytes) -> list[dict[str, Any]]:
    *items, rest = data.split(b"\n\n")
    assert rest == b""
    assert all(item.startswith(b"data: {") and b"\n" not in item for item in items)
    return [json.loads(item[6:]) for item in items]


def event(data: bytes) -> dict[str, Any]:
    (one,) = events(data)
    return one


def chat(*, n: int = 2, uses_functions: bool = False) -> ChatChunks:
    return ChatChunks(
        request_id="1", model='a"b', replies=[reply() for _ in range(n)],
        uses_functions=uses_functions,
    )  # fmt: skip


def deltas_of(chunks: ChatChunks, *texts: str) -> list[dict[str, Any]]:
    """What a choice's deltas say, text by text."""
    data = b"".join(chunks.update(0, delta(text)) for text in texts) + chunks.update(0, delta("", Finish.STOP))
    return [one["choices"][0]["delta"] for one in events(data)]


def test_a_stream_of_content() -> None:
    chunks = chat()
    first, text = event(chunks.first(0)), event(chunks.update(0, delta('é "x"\n')))
    end = event(chunks.end(0, "stop", {"t": 1}))
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}]
    assert text["choices"] == [{"index": 0, "delta": {"content": 'é "x"\n'}, "logprobs": None, "finish_reason": None}]
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert end["t"] == 1
    for chunk in (first, text, end):
        assert (chunk["id"], chunk["object"], chunk["model"]) == ("chatcmpl-1", "chat.completion.chunk", 'a"b')
        assert chunk["created"] == first["created"]
        assert "usage" not in chunk


def test_a_delta_without_news_is_no_chunk() -> None:
    assert chat().update(0, delta("<")) == b""


def test_a_call_begins_with_its_name_and_its_arguments_follow() -> None:
    chunks = chat()
    assert deltas_of(chunks, "ok", '<c f>{"x"', ":1}", "</c><c g>{}</c>") == [
        {"content": "ok"},
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_1", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert chunks.reason(0, Finish.STOP) == "tool_calls"
    assert chunks.reason(0, Finish.LENGTH) == "length"
    assert chunks.reason(1, Finish.STOP) == "stop"


def test_the_older_form_has_one_call() -> None:
    chunks = chat(uses_functions=True)
    assert deltas_of(chunks, "<c f>{}</c>", "<c g>{}</c>") == [
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": "{}"}},
    ]
    assert chunks.reason(0, Finish.STOP) == "function_call"
    for text in ("<c f>{}", "</c>"):
        chunks.gather(1, delta(text))
    message = chunks.choice(1, "function_call")["message"]
    assert message["function_call"] == {"name": "f", "arguments": "{}"}
    assert "tool_calls" not in message


def test_thinking_is_no_content() -> None:
    chunks = chat()
    assert deltas_of(chunks, "<t>why", "</t>so") == [
        {"reasoning_content": "why", "reasoning": "why"},
        {"content": "so"},
    ]
    assert chunks.n_thinking == 1


def test_no_chunk_but_the_last_has_usage() -> None:
    """A null, as OpenAI has it, makes some clients skip the chunk."""
    chunks = chat()
    data = [chunks.first(0), chunks.end(0, "stop", {})]
    data += [chunks.update(0, delta(text, logprobs=[HALF])) for text in ("x", "<t>y", "</t><c f>{}", "")]
    assert not any("usage" in one for part in data for one in events(part))
    last = event(chunks.last({"usage": {"total_tokens": 3}}))
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})


def test_logprobs_stand_with_the_content_or_alone() -> None:
    chunks = chat()
    choice = event(chunks.update(1, delta("xy", logprobs=[HALF, WORD])))["choices"][0]
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
    alone = event(chunks.update(1, delta("", logprobs=[WORD])))["choices"][0]
    assert (alone["delta"], len(alone["logprobs"]["content"])) == ({"content": ""}, 1)


def test_a_whole_chat() -> None:
    chunks = chat()
    for text in ("<t>why</t>", "hi", ' <c f>{"x":1}</c>'):
        chunks.gather(0, delta(text, logprobs=[WORD]))
    chunks.gather(1, delta("yes"))
    answer = json.loads(chunks.whole([chunks.choice(0, "tool_calls"), chunks.choice(1, "length")], {"usage": {}}))
    assert answer["object"] == "chat.completion"
    assert len(answer["choices"][0]["logprobs"]["content"]) == 3
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hi ",
        "refusal": None,
        "reasoning_content": "why",
        "reasoning": "why",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
    }
    assert answer["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": "yes", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }


def test_a_call_alone_has_no_content() -> None:
    chunks = chat()
    chunks.gather(0, delta("<c f>{}</c>"))
    assert chunks.choice(0, "tool_calls")["message"]["content"] is None
