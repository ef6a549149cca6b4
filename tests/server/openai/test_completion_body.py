"""The body of /v1/completions: prompts in every form, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.http import bodies
from localrun.server.openai import completion_body
from localrun.server.openai.completion_body import CompletionBody

N_VOCAB = 1000


def completion(**fields: Any) -> CompletionBody:
    return bodies.decode(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionBody)


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
        completion_body.check_tokens(completion(prompt=prompt).prompts(), N_VOCAB)
    assert (caught.value.field or "").startswith("prompt")


def test_nothing_before_a_suffix_is_a_prompt() -> None:
    assert completion(prompt="", suffix="}").prompts() == [""]


def test_too_many_answers_in_one_request() -> None:
    assert len(completion(prompt=["x"] * 64).prompts()) == 64
    for fields in ({"prompt": ["x"] * 65}, {"prompt": ["x"] * 33, "n": 2}, {"prompt": ["x"] * 33, "best_of": 2}):
        with pytest.raises(BadRequest, match="prompt"):
            completion(**fields).prompts()


def test_token_ids_must_be_in_the_vocabulary() -> None:
    completion_body.check_tokens([[0, 999], "text"], N_VOCAB)
    with pytest.raises(BadRequest, match="1000"):
        completion_body.check_tokens([[0, 1000]], N_VOCAB)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "suffix": "}"}, "echo"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        completion(**fields).check_supported()
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["echo", "suffix"])
def test_what_needs_text_and_not_token_ids(field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        completion(prompt=[1, 2], **{field: True if field == "echo" else "}"}).prompts()


def test_more_candidates_than_answers() -> None:
    assert completion(best_of=4, n=2).n_candidates == 4
    assert completion(n=2).n_candidates == 2
    completion(best_of=2, n=2, stream=True).check_supported()
