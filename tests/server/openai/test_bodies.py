"""Bodies of /v1: defaults, bounds, and what is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.http import bodies
from localrun.server.openai import bodies as openai_bodies
from localrun.server.openai.bodies import ChatBody, CompletionBody

N_VOCAB = 1000


def chat(**fields: Any) -> ChatBody:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return bodies.decode(json.dumps(body).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    return bodies.decode(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionBody)


def test_openai_s_defaults() -> None:
    body = chat()
    sampling = body.sampling(N_VOCAB)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repeat_penalty) == (0.0, 0.0, 1.0)
    assert (body.n_predict, body.n_choices, body.stop_strings, body.include_usage) == (-1, 1, (), False)


def test_parameters_of_all_dialects() -> None:
    sampling = chat(
        temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=7, logit_bias={"5": -100, "6": 2},
        top_k=-1, min_p=0.1, typical_p=0.8, repetition_penalty=1.2, repeat_last_n=128, mirostat=1,
    ).sampling(N_VOCAB)  # fmt: skip
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.top_k, sampling.min_p, sampling.typical_p) == (0, 0.1, 0.8)
    assert (sampling.repeat_penalty, sampling.penalty_last_n, sampling.mirostat) == (1.2, 128, 1)
    assert sampling.logit_bias == ((5, -math.inf), (6, 2.0))


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5).n_predict == 5
    assert chat(max_tokens=5, max_completion_tokens=9).n_predict == 9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 17), ("n", 10**9), ("n", "2"), ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 2**31),
        ("max_completion_tokens", -5), ("temperature", -1), ("temperature", "x"), ("top_p", 1.5),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("stop", ["x"] * 17), ("stop", [None]),
        ("seed", 2**63), ("top_logprobs", 21), ("top_logprobs", -1), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
        ("logit_bias", {str(n): 0 for n in range(1025)}), ("repeat_penalty", 0), ("mirostat", 5), ("stream", "yes"),
        ("messages", "hi"), ("messages", [{"content": "hi"}]), ("stream_options", {"include_usage": 1}),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        chat(**{field: value})
    assert (caught.value.field or "").startswith(field)


@pytest.mark.parametrize("token", ["x", "-1", "1000", "1.0", "", "９", "9" * 30])
def test_a_biased_token_must_be_in_the_vocabulary(token: str) -> None:
    with pytest.raises(BadRequest, match="logit_bias"):
        chat(logit_bias={token: 1}).sampling(N_VOCAB)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []}, {"tools": None, "tool_choice": "none"}, {"tool_choice": "auto"}, {"functions": []},
        {"response_format": {"type": "text"}}, {"response_format": None}, {"modalities": ["text"]}, {"user": "me"},
        {"logprobs": False, "top_logprobs": 0}, {"store": True}, {"metadata": {}}, {"reasoning_effort": "low"},
    ],
)  # fmt: skip
def test_empty_values_of_what_is_missing_pass(fields: dict[str, Any]) -> None:
    chat(**fields).check_supported()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_chat_refuses_what_it_cannot_do(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        chat(**fields).check_supported()
    assert caught.value.field == field


def test_messages_for_the_template() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                "name": "me",
            },
            {"role": "assistant", "content": None, "tool_calls": None},
        ]
    )
    assert body.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
)
def test_a_bad_message_is_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(messages=[message]).template_messages()
    assert caught.value.field == field


def test_no_messages_is_an_error() -> None:
    with pytest.raises(BadRequest, match="messages"):
        chat(messages=[]).template_messages()


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
        openai_bodies.check_tokens(completion(prompt=prompt).prompts(), N_VOCAB)
    assert (caught.value.field or "").startswith("prompt")


def test_too_many_answers_in_one_request() -> None:
    assert len(completion(prompt=["x"] * 64).prompts()) == 64
    for fields in ({"prompt": ["x"] * 65}, {"prompt": ["x"] * 33, "n": 2}):
        with pytest.raises(BadRequest, match="prompt"):
            completion(**fields).prompts()


def test_token_ids_must_be_in_the_vocabulary() -> None:
    openai_bodies.check_tokens([[0, 999], "text"], N_VOCAB)
    with pytest.raises(BadRequest, match="1000"):
        openai_bodies.check_tokens([[0, 1000]], N_VOCAB)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"suffix": "}"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_completions_refuse_what_they_cannot_do(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        completion(**fields).check_supported()
    assert caught.value.field == field


def test_token_ids_cannot_be_echoed() -> None:
    with pytest.raises(BadRequest, match="echo"):
        completion(prompt=[1, 2], echo=True).prompts()
