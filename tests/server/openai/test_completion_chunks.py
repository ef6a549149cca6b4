"""Chunks of a completion, and which candidates are the best."""

from __future__ import annotations

import json
from typing import Any

from localrun.server.openai.completion_chunks import CompletionChunks
from localrun.server.openai.completions import best
from localrun.wire import ChosenLogprob, TokenLogprob
from tests.server.openai.stub_parser import delta

HALF = ChosenLogprob(7, b"\xc3", -0.5, (TokenLogprob(7, b"\xc3", -0.5), TokenLogprob(8, b"a", -1.0)))
WORD = ChosenLogprob(9, b"word", -0.1, ())


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: {")
    assert data.count(b"\n") == 2
    parsed: dict[str, Any] = json.loads(data[6:])
    return parsed


def completions(*echoes: str, shows_logprobs: bool = True) -> CompletionChunks:
    return CompletionChunks(
        request_id="1", model="m", include_usage=False, echoes=echoes, shows_logprobs=shows_logprobs
    )


def test_a_stream() -> None:
    chunks = completions()
    assert chunks.first(0) == b""
    assert chunks.news(0, delta("")) == b""
    text = event(chunks.news(0, delta("x")))
    assert (text["id"], text["object"]) == ("cmpl-1", "text_completion")
    assert text["choices"] == [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}]
    assert event(chunks.end(0, "length", {}))["choices"][0]["text"] == ""


def test_echo_puts_each_prompt_before_its_text() -> None:
    chunks = completions("one ", "two ")
    assert event(chunks.first(1))["choices"][0]["text"] == "two "
    chunks.gather(0, delta("x"))
    assert chunks.choice(0, "stop")["text"] == "one x"


def test_logprobs_count_characters_per_choice() -> None:
    chunks = completions()
    first = chunks.logprobs(0, [WORD, HALF])
    assert first["tokens"] == ["word", "\ufffd"]
    assert first["token_logprobs"] == [-0.1, -0.5]
    assert first["top_logprobs"] == [{}, {"\ufffd": -0.5, "a": -1.0}]
    assert first["text_offset"] == [0, 4]
    assert chunks.logprobs(0, [WORD])["text_offset"] == [5]
    assert chunks.logprobs(1, [WORD])["text_offset"] == [0]


def test_the_best_are_the_most_probable_per_token() -> None:
    chunks = completions(shows_logprobs=False)
    # Two prompts with three candidates each; a long one must not lose for being long.
    for index, logprobs in enumerate([(-1.0,), (-0.5, -0.5, -0.5), (-0.9,), (-0.1,), (-3.0,), (-0.2,)]):
        for logprob in logprobs:
            chunks.gather(index, delta(str(index), logprobs=[ChosenLogprob(1, b"x", logprob, ())]))
    chosen = best(chunks, ["stop"] * 6, n_candidates=3, n_choices=2)
    assert [(choice["index"], choice["text"]) for choice in chosen] == [(0, "111"), (1, "2"), (2, "3"), (3, "5")]
    assert all(choice["logprobs"] is None for choice in chosen)
