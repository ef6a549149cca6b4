"""The body of /v1/completions: prompts in every form, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from localrun.errors import BadRequest
from localrun.server.http.exchange import decode_body
from localrun.server.openai.completions import CompletionBody, CompletionChunks, best, check_tokens
from localrun.wire import ChosenLogprob, Scores, TokenLogprob
from tests.server.openai.stub_parser import delta

N_VOCAB = 1000


def completion(**fields: Any) -> CompletionBody:
    return decode_body(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionBody)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_in_every_form(prompt: Any, expected: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", 1], ["a", [1]], [1, [2]], [1.5], None, [-1], [[-1]], {}])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(BadRequest, match="prompt") as caught:
        check_tokens(completion(prompt=prompt).prompts(), N_VOCAB)
    assert (caught.value.field or "").startswith("prompt")


def test_nothing_before_a_suffix_is_a_prompt() -> None:
    assert completion(prompt="", suffix="}").prompts() == [""]


def test_too_many_answers_in_one_request() -> None:
    assert len(completion(prompt=["x"] * 64).prompts()) == 64
    for fields in ({"prompt": ["x"] * 65}, {"prompt": ["x"] * 33, "n": 2}, {"prompt": ["x"] * 33, "best_of": 2}):
        with pytest.raises(BadRequest, match="prompt"):
            completion(**fields).prompts()


def test_token_ids_must_be_in_the_vocabulary() -> None:
    check_tokens([[0, 999], "text"], N_VOCAB)
    with pytest.raises(BadRequest, match="1000"):
        check_tokens([[0, 1000]], N_VOCAB)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "suffix": "}"}, "echo"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        completion(**fields).check_supported()
    assert caught.value.field == field


def test_what_needs_text_and_not_token_ids() -> None:
    with pytest.raises(BadRequest, match="suffix"):
        completion(prompt=[1, 2], suffix="}").prompts()


def test_more_candidates_than_answers() -> None:
    assert completion(best_of=4, n=2).n_candidates == 4
    assert completion(n=2).n_candidates == 2
    completion(best_of=2, n=2, stream=True).check_supported()


HALF = ChosenLogprob(7, b"\xc3", -0.5, (TokenLogprob(7, b"\xc3", -0.5), TokenLogprob(8, b"a", -1.0)))
WORD = ChosenLogprob(9, b"word", -0.1, ())


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: {")
    assert data.count(b"\n") == 2
    parsed: dict[str, Any] = json.loads(data[6:])
    return parsed


def completions(*echoes: str, shows_logprobs: bool = True) -> CompletionChunks:
    return CompletionChunks(request_id="1", model="m", n_choices=8, echoes=echoes, shows_logprobs=shows_logprobs)


def test_a_stream() -> None:
    chunks = completions()
    assert chunks.first(0) == b""
    assert chunks.update(0, delta("")) == b""
    text = event(chunks.update(0, delta("x")))
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


def test_parts_of_a_character_have_one_offset() -> None:
    apple = [ChosenLogprob(1, part, -0.1, ()) for part in (b" \xf0\x9f", b"\x8d", b"\x8e")]
    chunks = completions()
    assert chunks.logprobs(0, apple[:2])["text_offset"] == [0, 1]
    assert chunks.logprobs(0, [apple[2], WORD])["text_offset"] == [1, 2]


def test_offsets_are_places_in_the_echoed_text() -> None:
    """Whatever the tokenizer put in front of the prompt: those who evaluate count from where it ends."""
    chunks = completions("Hi you")
    pieces = [ChosenLogprob(1, piece, -0.1, ()) for piece in (b"<bos>", b" Hi", b" you", b"!")]
    chunks.gather(0, msgspec.structs.replace(delta(""), scores=Scores(0, tuple(pieces[:3]))))
    chunks.gather(0, delta("!", logprobs=pieces[3:]))
    choice = chunks.choice(0, "stop")
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("Hi you!", [0, 0, 2, 6])


def test_the_chosen_token_is_among_the_likeliest_ones_as_openai_has_it() -> None:
    chosen = ChosenLogprob(1, b"rare", -9.0, (TokenLogprob(2, b"a", -0.1),))
    assert completions().logprobs(0, [chosen])["top_logprobs"] == [{"a": -0.1, "rare": -9.0}]


def test_the_best_are_the_most_probable_per_token() -> None:
    chunks = completions(shows_logprobs=False)
    # Two prompts with three candidates each; a long one must not lose for being long.
    for index, logprobs in enumerate([(-1.0,), (-0.5, -0.5, -0.5), (-0.9,), (-0.1,), (-3.0,), (-0.2,)]):
        for logprob in logprobs:
            chunks.gather(index, delta(str(index), logprobs=[ChosenLogprob(1, b"x", logprob, ())]))
    chosen = best(chunks, ["stop"] * 6, n_candidates=3, n_choices=2)
    assert [(choice["index"], choice["text"]) for choice in chosen] == [(0, "111"), (1, "2"), (2, "3"), (3, "5")]
    assert all(choice["logprobs"] is None for choice in chosen)
