"""Options and bodies of /api: defaults, bounds, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.http import bodies
from localrun.server.ollama.bodies import ChatBody, GenerateBody, ModelBody, Options


def options(**values: Any) -> Options:
    body = bodies.decode(json.dumps({"model": "m", "options": values}).encode(), GenerateBody)
    assert body.options is not None
    return body.options


def test_ollama_s_defaults() -> None:
    sampling = Options().sampling()
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.9, 0.0)
    assert (sampling.penalty_last_n, sampling.repeat_penalty) == (64, 1.0)
    assert (sampling.typical_p, sampling.mirostat, sampling.seed) == (1.0, 0, None)
    assert (Options().n_predict, Options().n_keep, Options().stop_strings) == (-1, 4, ())


def test_options_become_sampling_parameters() -> None:
    sampling = options(
        temperature=0, top_k=5.0, top_p=1, min_p=0.05, typical_p=0.9, repeat_last_n=-1, repeat_penalty=1.1,
        presence_penalty=-1.5, frequency_penalty=2, mirostat=2, mirostat_tau=4, mirostat_eta=0.2, seed=42.0,
    ).sampling()  # fmt: skip
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 5, 1.0, 0.05)
    assert (sampling.typical_p, sampling.penalty_last_n, sampling.repeat_penalty) == (0.9, -1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.5, 2.0)
    assert (sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta) == (2, 4.0, 0.2)
    assert sampling.seed == 42
    assert isinstance(sampling.seed, int)


def test_a_number_with_a_fraction_is_cut_as_ollama_does() -> None:
    """litellm computes num_ctx with a fraction."""
    assert options(num_ctx=8192 * 1.25 + 0.5, num_predict=12.9).n_predict == 12


@pytest.mark.parametrize(
    ("num_predict", "expected"), [(None, -1), (-1, -1), (-2, -1), (0, 0), (7, 7), (2**31 - 1, 2**31 - 1)]
)
def test_num_predict(num_predict: int | None, expected: int) -> None:
    assert options(num_predict=num_predict).n_predict == expected


def test_null_and_unknown_options_are_ignored() -> None:
    assert options(temperature=None, num_gqa=8, vocab_only=True, low_vram="no").sampling() == Options().sampling()


@pytest.mark.parametrize(("stop", "expected"), [("x", ("x",)), (["x", "", "yy"], ("x", "yy")), ([], ()), ("", ())])
def test_stop_is_a_text_or_a_list(stop: Any, expected: tuple[str, ...]) -> None:
    assert options(stop=stop).stop_strings == expected


@pytest.mark.parametrize(("seed", "expected"), [(-1, None), (0, 0), (2**63 - 1, 2**63 - 1), (-7, -7)])
def test_seeds(seed: int, expected: int | None) -> None:
    assert options(seed=seed).sampling().seed == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1), ("temperature", "hot"), ("temperature", True), ("temperature", 1e9),
        ("top_k", -2), ("top_k", "40"), ("top_p", 1.1), ("top_p", -0.1), ("min_p", 2), ("typical_p", 0),
        ("repeat_penalty", 0), ("repeat_penalty", -1), ("repeat_last_n", -2), ("presence_penalty", 1e9),
        ("num_predict", -3), ("num_predict", 2**63), ("num_predict", 1e300), ("num_keep", -2),
        ("num_ctx", -1), ("num_ctx", "4096"), ("num_gpu", "all"), ("num_thread", -1), ("use_mmap", "yes"),
        ("mirostat", 3), ("mirostat_eta", -1), ("seed", 2**63), ("seed", 1e300), ("seed", "x"),
        ("stop", 5), ("stop", [1]), ("stop", ["x"] * 17), ("stop", ["x" * 2000]),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(option: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=option) as caught:
        options(**{option: value})
    assert (caught.value.field or "").startswith(f"options.{option}")


HARMLESS = {"format": "", "think": False, "images": [], "suffix": "", "template": "", "shift": True, "width": 0}


def test_empty_values_of_what_is_missing_pass() -> None:
    body = bodies.decode(json.dumps({"model": "m", "prompt": "x", **HARMLESS}).encode(), GenerateBody)
    body.check_supported()
    chat = {"model": "m", "messages": [], "tools": [], "format": None, "think": None}
    bodies.decode(json.dumps(chat).encode(), ChatBody).check_supported()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "json"), ("format", {"type": "object"}), ("think", True), ("think", "high"),
        ("images", ["aGVsbG8="]), ("suffix", "}"), ("template", "{{ .Prompt }}"),
    ],
)  # fmt: skip
def test_generate_refuses_what_it_cannot_do(field: str, value: Any) -> None:
    body = bodies.decode(json.dumps({"model": "m", "prompt": "x", field: value}).encode(), GenerateBody)
    with pytest.raises(BadRequest, match=field) as caught:
        body.check_supported()
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), [("tools", [{}]), ("format", "json"), ("think", "low")])
def test_chat_refuses_what_it_cannot_do(field: str, value: Any) -> None:
    body = bodies.decode(json.dumps({"model": "m", "messages": [], field: value}).encode(), ChatBody)
    with pytest.raises(BadRequest, match=field):
        body.check_supported()


def messages(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return bodies.decode(json.dumps({"model": "m", "messages": turns}).encode(), ChatBody).template_messages()


def test_messages_for_the_template() -> None:
    assert messages(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "images": None},
        {"role": "assistant", "thinking": "hm", "content": "hello", "tool_calls": []},
        {"role": "tool", "content": "42", "tool_name": "answer"},
        {"role": "user"},
    ) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"role": "robot", "content": "x"}, r"messages[1].role"),
        ({"role": "user", "content": "x", "images": ["aGk="]}, r"messages[1].images"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, r"messages[1].tool_calls"),
    ],
)
def test_a_bad_message_is_named(turn: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        messages({"role": "user", "content": "x"}, turn)
    assert caught.value.field == field


def test_a_model_has_two_names_for_its_field() -> None:
    assert ModelBody(name="a").model_name == "a"
    assert ModelBody(model="b", name="a").model_name == "b"
    with pytest.raises(BadRequest, match="model is required"):
        _ = ModelBody().model_name
