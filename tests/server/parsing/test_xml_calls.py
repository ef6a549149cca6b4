"""Bare text gets the type that the schema says."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.server.parsing.xml_calls import typed


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, " a ", " a "),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
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
        ({}, "12", 12),
        ({}, "text", "text"),
    ],
)
def test_a_value_has_its_schema_s_type(schema: dict[str, Any], text: str, value: object):
    parameters = {"properties": {"p": schema}, "$defs": {"id": {"type": "string"}}}
    assert typed(text, "p", parameters) == value


def test_a_parameter_that_is_not_in_the_schema_is_what_it_looks_like():
    assert typed("3", "q", {"properties": {}}) == 3
    assert typed("x", "q", {}) == "x"
    assert typed("1", "q", {"properties": "odd"}) == 1
