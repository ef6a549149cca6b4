"""The shape of an answer, by whichever field it is asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from localrun.errors import BadRequest
from localrun.server import structured
from localrun.server.openai import bodies
from localrun.server.openai.bodies import ChatMessage, FormatFields
from localrun.wire import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def grammar(**fields: Any) -> Grammar | None:
    return msgspec.convert(fields, FormatFields).answer_grammar()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
def test_a_schema_in_every_place(fields: dict[str, Any]) -> None:
    strict = "response_format" in fields and "json_schema" in fields["response_format"]
    assert grammar(**fields) == structured.json_schema(SCHEMA, field="x", strict=strict)


def test_no_shape() -> None:
    assert grammar() is grammar(response_format={"type": "text"}) is grammar(grammar="") is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"json_schema": SCHEMA, "grammar": "x"}, "grammar"),
        ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, "json_schema"),
    ],
)
def test_what_is_none_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("place", ["response_format.json_schema.schema", "json_schema"])
def test_a_slip_of_a_keyword_is_named_with_its_path(place: str) -> None:
    schema = {"type": "object", "properties": {"a": {"minLenght": 1}}}
    asked: dict[str, Any] = {"json_schema": schema}
    if place != "json_schema":
        asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with pytest.raises(BadRequest, match="minLength") as caught:
        grammar(**asked)
    assert (caught.value.field or "").startswith(place)
    assert "properties.a" in caught.value.message


def for_template(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return bodies.for_template(msgspec.convert(list(messages), list[ChatMessage]))


def test_roles_and_parts() -> None:
    assert for_template(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never"},
    ) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "never"},
    ]


def test_calls_and_their_answers() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
    messages = for_template(
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    )
    assert messages[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "x"}}}
    ]
    assert messages[0]["thinking"] == "hm"
    assert messages[1] == {"role": "tool", "content": "found", "tool_call_id": "c1", "name": "look_up"}


def test_the_older_form_of_a_call() -> None:
    messages = for_template(
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    )
    assert messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert messages[1] == {"role": "tool", "content": "1", "tool_call_id": "f", "name": "f"}


@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_no_arguments_in_every_spelling(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert for_template({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "a robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{}]}, "messages[0].content[0]"),
    ],
)
def test_a_bad_message_is_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        for_template(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "arguments", ['{"city": ', "not json", '{"a":1}{"b":2}', "[]", "3", '"text"', "[" * 100_000, '{"a": "\ud83d']
)
def test_a_call_with_broken_arguments_is_taken_back(arguments: str) -> None:
    """Models write such, and answers end in the middle of them."""
    call = {"function": {"name": "f", "arguments": arguments}}
    [made] = for_template({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"]
    assert made["function"]["arguments"] == {"arguments": arguments}


def test_arguments_with_a_raw_line_break_are_read() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "x\ny"}'}}
    [made] = for_template({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"]
    assert made["function"]["arguments"] == {"a": "x\ny"}


@pytest.mark.parametrize(
    ("role", "read"),
    [("User", "user"), ("SYSTEM", "system"), ("developer", "system"), ("function", "tool"), ("control", "control")],
)
def test_roles_are_read_as_they_are_meant(role: str, read: str) -> None:
    assert for_template({"role": role, "content": "x"})[0]["role"] == read


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "because"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "because"}]},
        {"type": "reasoning", "text": "because"},
    ],
)
def test_parts_of_thinking_are_thinking(part: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": [part, {"type": "text", "text": "yes"}]}
    assert for_template(said) == [{"role": "assistant", "content": "yes", "thinking": "because"}]


def test_no_messages_is_an_error() -> None:
    with pytest.raises(BadRequest, match="messages"):
        for_template()
