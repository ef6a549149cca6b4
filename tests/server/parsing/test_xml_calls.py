"""Bare text gets the type that the schema says."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.server.parsing.xml_calls import nested, typed

# It has more ways to itself than anybody could go.
ONE_OF_ITSELF = {"anyOf": [{"$ref": "#/$defs/one"}] * 1000 + [{"type": "string"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, " a ", " a "),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": "integer"}, "NULL", None),
        ({"type": "integer"}, "007", 7),
        ({"type": ["string", "integer"]}, "FALSE", "FALSE"),
        ({"type": ["string", "integer"]}, "007", "007"),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        (
            {"type": "object"},
            r"""{'a': [True, None, 'it\'s "so"', "it's\n"]}""",
            {"a": [True, None, 'it\'s "so"', "it's\n"]},
        ),
        ({"type": "object"}, "{'a': 'True'", "{'a': 'True'"),
        ({"type": "array"}, "[" + "-" * 100_000 + "1]", "[" + "-" * 100_000 + "1]"),
        ({"type": "array"}, "['a', {1}]", "['a', {1}]"),
        ({"type": ["string", "array"]}, "['a']", "['a']"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "null"}, "null", "null"),
        ({"$ref": "#/$defs/id"}, "12", "12"),
        ({"$ref": "#/$defs/none"}, "12", 12),
        ({"$ref": "#/$defs/one"}, "12", "12"),
        ({"anyOf": 5, "allOf": {"type": "string"}}, "12", 12),
        ({}, "12", 12),
        ({}, "text", "text"),
    ],
)
def test_a_value_has_its_schema_s_type(schema: dict[str, Any], text: str, value: object):
    parameters = {"properties": {"p": schema}, "$defs": {"id": {"type": "string"}, "one": ONE_OF_ITSELF}}
    assert typed(text, "p", parameters) == value


def test_a_parameter_that_is_not_in_the_schema_is_what_it_looks_like():
    assert typed("3", "q", {"properties": {}}) == 3
    assert typed("x", "q", {}) == "x"
    assert typed("1", "q", {"properties": "odd"}) == 1


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "object"}, "<a>1</a>\n<b><c>x</c></b>", {"a": 1, "b": {"c": "x"}}),
        ({"type": "array"}, "<item>1</item><item>2</item>", [1, 2]),
        ({"type": "object", "properties": {"item": {"type": "string"}}}, "<item>1</item>", {"item": "1"}),
        ({"type": "object"}, "<a>one <b>2</b> three</a>", "<a>one <b>2</b> three</a>"),
        ({"type": "object"}, "<a>1</a> and <b>2</b>", "<a>1</a> and <b>2</b>"),
        ({"type": "object"}, "<a>1</a><a>2</a>", "<a>1</a><a>2</a>"),
        ({"type": "object"}, "<a>1</b>", "<a>1</b>"),
    ],
)
def test_elements_are_an_object_or_a_list_only_if_nothing_is_lost(schema: dict[str, Any], text: str, value: object):
    assert nested(text, "</", "p", {"properties": {"p": schema}}) == value
