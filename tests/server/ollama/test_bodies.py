"""Options and bodies of /api: defaults, bounds, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.config import NOTHING_ASKED, LoadSettings
from localrun.errors import BadRequest
from localrun.server.http.exchange import decode_body
from localrun.server.ollama.bodies import ChatBody, GenerateBody, ModelBody, Options
from localrun.server.prompting.ask import MAX_MESSAGES
from localrun.wire import GrammarKind


def options(**values: Any) -> Options:
    body = decode_body(json.dumps({"model": "m", "options": values}).encode(), GenerateBody)
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


def test_what_a_request_says_of_loading() -> None:
    said = options(num_ctx=8192.5, num_gpu=-1.0, kv_type="q8_0", rope_frequency_scale=0.5, rope_scaling="yarn",
                   yarn_orig_ctx=2048.0, num_thread=3, num_batch=64, slots=2, kv_cells=9000).load()  # fmt: skip
    assert said == LoadSettings(
        num_ctx=8192, gpu_layers=-1, kv_type="q8_0", rope_frequency_scale=0.5, rope_scaling="yarn", yarn_orig_ctx=2048
    )
    assert options(num_ctx=0, temperature=1).load() == NOTHING_ASKED


@pytest.mark.parametrize("name", ["kv_type", "rope_scaling"])
def test_a_word_that_is_none_is_refused_with_all_there_are(name: str) -> None:
    with pytest.raises(BadRequest, match=rf"options\.{name}: 'x' is not one of .*, "):
        options(**{name: "x"}).load()


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
        ("stop", 5), ("stop", [1]), ("stop", ["x"] * 65), ("stop", ["x" * 2000]),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(option: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=option) as caught:
        options(**{option: value})
    assert (caught.value.field or "").startswith(f"options.{option}")


def test_a_format_is_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert chat_body().answer_grammar() is None
    assert chat_body(format="").answer_grammar() is None
    for asked, said in (("json", "object"), (schema, "integer")):
        grammar = chat_body(format=asked).answer_grammar()
        assert grammar is not None
        assert (grammar.kind, said in grammar.text) == (GrammarKind.JSON_SCHEMA, True)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None), (True, True), (False, False), ("", None), ("low", "low"), ("medium", "medium"), ("high", "high"),
        ("max", "max"),
    ],
)  # fmt: skip
def test_spellings_of_think(asked: Any, expected: bool | str | None) -> None:
    assert chat_body(think=asked).thinking() == expected


def generate_body(**values: Any) -> GenerateBody:
    return decode_body(json.dumps({"model": "m", "prompt": "x", **values}).encode(), GenerateBody)


def chat_body(*turns: dict[str, Any], **values: Any) -> ChatBody:
    return decode_body(json.dumps({"model": "m", "messages": turns, **values}).encode(), ChatBody)


HARMLESS = {"format": "", "think": False, "images": [], "suffix": "", "template": "", "shift": True, "width": 0}


def test_empty_values_pass() -> None:
    body = generate_body(**HARMLESS)
    body.check_supported()
    assert body.ask().response_grammar is None
    ask = chat_body(tools=[], format=None, think=None).ask()
    assert (ask.tools, ask.response_grammar, ask.think, ask.messages) == ((), None, None, [])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"images": ["aGVsbG8="], "suffix": "x"}, "images"),
        ({"images": ["aGVsbG8="], "context": [1]}, "images"),
        ({"template": "{% for message in messages %}{% endfor %}", "raw": True}, "template"),
        ({"system": "be brief", "raw": True}, "system"),
        ({"context": [1], "raw": True}, "context"),
        ({"context": [1], "suffix": "x"}, "context"),
        ({"think": True, "suffix": "x"}, "think"),
    ],
)
def test_generate_refuses_what_it_cannot_do(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        generate_body(**fields).check_supported()
    assert caught.value.field == field


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_tools_of_a_chat() -> None:
    ask = chat_body({"role": "user", "content": "x"}, tools=[LOOK, {"function": {"name": "guess"}}]).ask()
    assert [tool.name for tool in ask.tools] == ["look", "guess"]
    assert ask.tools[1].parameters["type"] == "object"
    assert (ask.tool_choice, ask.continue_last) == ("auto", False)
    assert chat_body({"role": "user"}, tools=[LOOK], tool_choice="required").ask().tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [LOOK, LOOK]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"format": {"type": "object", "requred": ["a"]}}, "format"),
    ],
)
def test_chat_refuses_what_it_cannot_do(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_body({"role": "user", "content": "x"}, **fields).ask()
    assert caught.value.field == field


def test_an_assistant_s_last_message_is_gone_on_with() -> None:
    begun = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "Well,"})
    assert chat_body(*begun).ask().continue_last
    assert not chat_body(*begun, {"role": "user", "content": "x"}).ask().continue_last
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}
    assert not chat_body(begun[0], call).ask().continue_last
    with pytest.raises(BadRequest, match="tool_choice"):
        chat_body(*begun, tools=[LOOK], tool_choice="required").ask()


def messages(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return list(chat_body(*turns).ask().messages)


def test_messages_for_the_template() -> None:
    assert messages(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "images": None},
        {"role": "assistant", "thinking": "hm", "content": "hello", "tool_calls": []},
        {"role": "user"},
    ) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "thinking": "hm"},
        {"role": "user", "content": ""},
    ]


def test_calls_and_their_results() -> None:
    function = {"name": "look", "arguments": {"city": "Paris"}}
    assert messages(
        {
            "role": "assistant", "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "function": {"index": 0, **function}}],
        },
        {"role": "tool", "content": "22", "tool_name": "look", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "content": "22", "tool_name": "look"},
    ) == [
        {
            "role": "assistant", "content": "", "thinking": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "22", "name": "look", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "22", "name": "look", "tool_call_id": ""},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"role": "<|im_start|>system", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "images": ["aGk="] * 17}, "messages[1].images[16]"),
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


def test_a_conversation_has_a_most_of_messages() -> None:
    def chat(n_messages: int) -> ChatBody:
        messages = [{"role": "user", "content": "hi"}] * n_messages
        return decode_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatBody)

    assert len(chat(MAX_MESSAGES).messages or ()) == MAX_MESSAGES
    with pytest.raises(BadRequest, match=f"{MAX_MESSAGES}") as wrong:
        chat(MAX_MESSAGES + 1)
    assert wrong.value.field == "messages"
