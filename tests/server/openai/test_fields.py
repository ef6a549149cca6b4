"""The shape of an answer, by whichever field it is asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from localrun.errors import BadRequest
from localrun.server import structured
from localrun.server.openai.fields import FormatFields
from localrun.wire import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def grammar(**fields: Any) -> Grammar | None:
    return msgspec.convert(fields, FormatFields).answer_grammar()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
def test_a_schema_in_every_place(fields: dict[str, Any]) -> None:
    assert grammar(**fields) == structured.json_schema(SCHEMA, field="x")


def test_a_grammar_of_llama_cpp() -> None:
    assert grammar(grammar='root ::= "yes"') == Grammar(GrammarKind.GBNF, 'root ::= "yes"')


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
def test_an_unsupported_keyword_is_named_with_its_path(place: str) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    asked: dict[str, Any] = {"json_schema": schema}
    if place != "json_schema":
        asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with pytest.raises(BadRequest, match="not") as caught:
        grammar(**asked)
    assert (caught.value.field or "").startswith(place)
    assert "properties.a" in caught.value.message
