"""What schemas of real programs mean: in the words of every draft, of OpenAPI and of generators.

The inputs are of the kinds that public suites and reports have; the right answers come from the standards.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server import notices
from localrun.server.structured import json_schema
from tests.server.structured.answers import takes, takes_value

TAGGED = {name: {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]} for name in "ab"}

# (schema, values that it describes, values that it does not)
MEANS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "a tuple of Draft 7": (
        {"type": "array", "items": [{"type": "string"}, {"type": "number"}], "additionalItems": False, "minItems": 2},
        [["a", 1]],
        [["a"], [1, "a"], ["a", 1, 2]],
    ),
    "a tuple and the rest": (
        {"items": [{"type": "boolean"}], "additionalItems": {"type": "null"}},
        [[True], [True, None, None], []],
        [[1], [True, True], {}],
    ),
    "nullable of OpenAPI": ({"type": "string", "nullable": True}, ["a", None], [1]),
    "nullable enum": ({"type": "string", "enum": ["a"], "nullable": True}, ["a", None], ["b"]),
    "nullable reference": (
        {"properties": {"x": {"$ref": "#/$defs/n", "nullable": True}}, "$defs": {"n": {"type": "integer"}}},
        [{"x": 1}, {"x": None}],
        [{"x": "a"}],
    ),
    "reference by a name of a generic type": (
        {"properties": {"x": {"$ref": "#/defs/List<Map[a|b, c]>"}}, "defs": {"List<Map[a|b, c]>": {"type": "integer"}}},
        [{"x": 1}],
        [{"x": "a"}],
    ),
    "not nullable": ({"type": "string", "nullable": False}, ["a"], [None]),
    "exclusive bounds of Draft 4": (
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False},
        [1, 3],
        [0, 4],
    ),
    "required of Draft 3": (
        {"type": "object", "properties": {"a": {"type": "string", "required": True}, "b": {"required": False}}},
        [{"a": ""}],
        [{}, {"b": 1}],
    ),
    "types in capital letters": (
        {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}, "required": ["a"]},
        [{"a": 1}],
        [{"a": "1"}, 1],
    ),
    "any type": ({"type": "object", "properties": {"a": {"type": "any"}}}, [{"a": 1}, {"a": [None]}], [[]]),
    "properties without a type": ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, [{"a": 1}], [1, True]),
    "properties beside alternatives of them": (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, 5],
    ),
    "names of properties that say nothing": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        [{"a": "b"}],
        [{"a": 1}],
    ),
    "names of properties by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}, {}],
        [{"A": 1}, {"a": "x"}],
    ),
    "names of properties from a list": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
        [{"x": 1}, {"x": 1, "y": 2}],
        [{"z": 1}],
    ),
    "names of properties by a reference, as Pydantic writes a dictionary of an enumeration": (
        {
            "properties": {"a": {"type": "object", "propertyNames": {"$ref": "#/$defs/C"}}},
            "$defs": {"C": {"enum": ["r", "g"], "title": "C", "type": "string", "description": "d"}},
        },
        [{"a": {"r": 1, "g": 2}}, {"a": {}}],
        [{"a": {"b": 1}}],
    ),
    "oneOf behind references": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": TAGGED},
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}],
    ),
    "oneOf by numbers": (
        {"oneOf": [{"properties": {"k": {"const": at}}, "required": ["k"]} for at in (1, 2)]},
        [{"k": 1}, {"k": 2}],
        [{"k": 3}],
    ),
    "allOf of one": ({"allOf": [{"type": "integer"}], "maximum": 5}, [5], [6, "a"]),
    "a reference alone in allOf, with a word about it, as generators write it": (
        {
            "properties": {"a": {"allOf": [{"$ref": "#/$defs/n"}], "title": "A", "default": {}}},
            "$defs": {"n": {"properties": {"b": {"type": "integer"}}}},
        },
        [{"a": {"b": 1}}, {}],
        [{"a": {"c": 1}}, {"x": 1}],
    ),
    "no others than those beside it": (
        {"allOf": [{"properties": {"foo": {}}}], "additionalProperties": {"type": "boolean"}},
        [],
        [{"foo": 1, "bar": True}],
    ),
    "all items but those beside it": (
        {"allOf": [{"prefixItems": [{"minimum": 3}]}], "items": {"minimum": 5}},
        [[5]],
        [[3, 5], [3]],
    ),
    "names of two kinds": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"], "type": "string"}},
        [{"x": 1}],
        [{"z": 1}],
    ),
    "words of others": (
        {
            "id": "http://x/y",
            "self": {"vendor": "v"},
            "type": "object",
            "readonly": True,
            "links": [],
            "properties": {},
        },
        [{}],
        [1],
    ),
    "an object without properties": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "keywords that are null": ({"type": "boolean", "enum": None, "items": None, "nullable": None}, [True], [1, None]),
    "formats of numbers": ({"type": "integer", "format": "int64"}, [1], [1.5]),
    "bounds of int64": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, 2**60], ["0"]),
    "the largest numbers": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1e308}, [0.5], ["0"]),
    "counts with a point": ({"type": "array", "maxItems": 2.0, "items": {}}, [[1, 2]], [[1, 2, 3]]),
    "counts beyond all answers": ({"type": "string", "maxLength": 2147483647}, ["abc"], [1]),
    "a counted object": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 1},
        [{"a": 1}],
        [{}],
    ),
    "a reference into words of others": (
        {"properties": {"a": {"$ref": "#/kinds/n"}}, "kinds": {"n": {"type": "integer"}}},
        [{"a": 1}],
        [{"a": "1"}],
    ),
    "a reference to a name": (
        {"properties": {"a": {"$ref": "#n"}}, "$defs": {"x": {"$anchor": "n", "type": "integer"}}},
        [{"a": 1}],
        [{"a": "1"}],
    ),
    "a reference into oneOf": (
        {
            "properties": {
                "a": {"oneOf": [{"type": "null"}, {"type": "integer"}]},
                "b": {"$ref": "#/properties/a/oneOf/1"},
            }
        },
        [{"b": 1}, {"a": None}],
        [{"b": None}],
    ),
    "a reference beside properties": (
        {"properties": {"a": {}}, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {"type": "integer"}}}}},
        [{"b": 1, "a": 1}, {"b": 1}, {"a": 1}],
        [{"c": 1}, {"b": "1"}],
    ),
    "a reference to itself beside other words": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"below": {"$ref": "#/$defs/node", "properties": {"x": {"type": "integer"}}}},
                }
            },
        },
        [{"below": {"below": {}, "x": 1}}],
        [{"below": {"x": "1"}}],
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_schema_means_what_it_says_in_any_dialect(name: str) -> None:
    schema, described, others = MEANS[name]
    assert [value for value in described if not takes_value(schema, value)] == []
    assert [value for value in others if takes_value(schema, value)] == []


# Dates and times that readers (Python's datetime, pydantic) take, and such as no calendar or clock has.
FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31", "0004-02-29", "2026-11-30"],
        ["2023-02-29", "1900-02-29", "5111-02-29", "2026-02-30", "2026-04-31", "2026-13-01", "0000-01-01", "2026-1-1"],
    ),
    "time": (
        ["21:10:59Z", "00:00:00.123456+02:00", "23:59:59-11:30"],
        ["21:10:60Z", "24:00:00Z", "21:10Z", "21:10:00", "21:10:00z", "21:10:00+24:00"],
    ),
    "date-time": (
        ["2024-02-29T21:10:00Z", "2026-01-01T00:00:00.5-05:00"],
        ["2023-02-29T21:10:00Z", "2026-01-01T00:00:60Z", "2026-01-01 00:00:00Z", "2026-01-01t00:00:00Z"],
    ),
    "hostname": (
        ["localhost", "a.b-c.example", "x" * 62],
        ["-a", "a-", "a..b", "x" * 64, "xn--x", "a_b", "", ".".join(["x" * 60] * 5)],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_only_what_readers_take(name: str) -> None:
    good, bad = FORMATS[name]
    schema = {"type": "string", "format": name}
    assert [text for text in good if not takes_value(schema, text)] == []
    assert [text for text in bad if takes_value(schema, text)] == []
    beside = schema | {"pattern": "^[^2]"}
    assert [text for text in good if takes_value(beside, text) == text.startswith("2")] == []


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25", "0.4999"], ["0", "0.0", "-0", "0.5", "0.50"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.25", "1.5"], ["1", "1.0", "1.51"]),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, ["-1.25", "-1.5"], ["-1", "-1.0"]),
        ({"exclusiveMaximum": 0}, ["-0.5", "-1"], ["0", "-0", "-0.0", "0.0"]),
        ({"exclusiveMaximum": 906.5999999999999}, ["905.5", "1"], ["906.5999999999999", "906.6"]),
        ({"minimum": 0, "exclusiveMinimum": 0}, ["1", "0.5"], ["0", "0.0"]),
    ],
)
def test_a_bound_that_is_excluded_is_no_answer(bounds: Any, inside: list[str], outside: list[str]) -> None:
    schema = {"type": "number"} | bounds
    assert [text for text in inside if not takes(schema, text)] == []
    assert [text for text in outside if takes(schema, text)] == []


NUMBER = 1234567890123456789


# (schema, the place of what is left out)
LEFT_OUT: list[tuple[Any, str]] = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "format.uniqueItems"),
    ({"type": "string", "format": "regex"}, "format.format"),
    ({"properties": {"a": {"items": {"contains": {}}}}}, "format.properties.a.items.contains"),
    ({"anyOf": [{"type": "null"}, {"if": {}, "type": "string"}]}, "format.anyOf[1].if"),
    ({"type": "string", "pattern": "^(?!a)"}, "format.pattern"),
    ({"type": "string", "pattern": r"\bword\b"}, "format.pattern"),
    ({"type": "number", "multipleOf": 1_000_003}, "format.multipleOf"),
    ({"type": "string", "$ref": "https://example.com/schema"}, "format.$ref"),
    ({"const": NUMBER}, "format.const"),
    ({"type": "integer", "enum": [1, NUMBER]}, "format.enum"),
    ({"type": "object", "propertyNames": {"minLength": 3}}, "format.propertyNames"),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/none"}}, "format.propertyNames"),
    ({"type": "object", "propertyNames": {"$ref": "#/propertyNames"}}, "format.propertyNames"),
    ({"type": "object", "propertyNames": {"enum": ["ab"], "pattern": "^b"}}, "format.propertyNames"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "format.minProperties"),
    ({"type": "integer", "minimum": 2**60}, "format.minimum"),
    ({"not": {"type": "string"}}, "format.not"),
    (
        {"type": "object", "patternProperties": {"a(?=b)": {}}, "additionalProperties": False},
        "format.patternProperties",
    ),
]


@pytest.mark.parametrize(("schema", "place"), LEFT_OUT, ids=[place for _, place in LEFT_OUT])
def test_what_cannot_be_enforced_is_left_out_with_a_notice_and_refused_when_strict(schema: Any, place: str) -> None:
    with notices.collected() as noted:
        json_schema(schema, field="format")
    assert [text.partition(": ")[0] for text in noted] == [place]
    with pytest.raises(BadRequest, match="strict") as caught:
        json_schema(schema, field="format", strict=True)
    assert caught.value.message.startswith(f"{place}: ")


def test_alternatives_that_one_value_may_match_are_taken_as_any_of_them_and_it_is_said() -> None:
    one = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    other = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    with notices.collected() as noted:
        assert takes_value({"oneOf": [one, other]}, {"a": 1})
    assert "oneOf" in noted[0]
    with pytest.raises(BadRequest, match="oneOf"):
        json_schema({"oneOf": [one, other]}, field="format", strict=True)


def test_a_constant_that_no_double_holds_never_comes_out_as_another_one() -> None:
    for schema in ({"const": NUMBER}, {"enum": [1, NUMBER]}, {"type": "integer", "enum": [NUMBER]}):
        assert takes(schema, str(NUMBER))
    assert not takes({"enum": [1, NUMBER]}, '"a"')
    assert takes({"const": 2**53}, str(2**53))
    assert not takes({"const": 2**53}, str(2**53 - 1))


@pytest.mark.parametrize("word", ["requred", "anyof", "additonalProperties", "type:", "minLenght", "itmes", "pattern "])
def test_a_word_one_letter_away_from_a_keyword_is_refused_with_its_path(word: str) -> None:
    with pytest.raises(BadRequest) as caught:
        json_schema({"properties": {"a": {word: ["x"]}}}, field="format")
    assert caught.value.message.startswith(f"format.properties.a: the keyword {word!r} is not known")


def test_what_is_no_slip_is_passed_over() -> None:
    words: dict[str, Any] = {
        "id": "x",
        "@type": "T",
        "href": "/",
        "if_": 1,
        "name": "n",
        "order": 3,
        "$x": 1,
    }
    assert json_schema({"type": "string"} | words, field="f") == json_schema({"type": "string"}, field="f")


def test_references_doubling_each_other_cost_what_they_are_long() -> None:
    """Each puts the next one, which has a property more, into two places."""
    defs: dict[str, Any] = {
        f"a{at}": {"$ref": f"#/$defs/a{at + 1}", "properties": {f"p{at}": {"$ref": f"#/$defs/a{at + 1}"}}}
        for at in range(60)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": defs | {"a60": {"type": "object", "properties": {"end": {}}}}}
    assert len(json_schema(schema, field="f").text) < 40 * len(json.dumps(schema))


def test_what_several_references_lead_to_elsewhere_is_kept_apart() -> None:
    schema = {
        "properties": {
            "a": {"$ref": "#/kinds/n"},
            "b": {"$ref": "#/properties/c/oneOf/1"},
            "c": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "kinds": {"n": {"type": "integer"}},
    }
    assert takes_value(schema, {"a": 1, "b": True, "c": None})
    assert not takes_value(schema, {"a": True})
    assert not takes_value(schema, {"b": 1})


def test_alternatives_that_refer_to_each_other_doubly_are_compared_once() -> None:
    """Each level has the next one in two properties: compared by recursion this would not end."""
    levels = {
        f"{side}{at}": {
            "type": "object",
            "required": ["x", "y"],
            "properties": {name: {"$ref": f"#/$defs/{side}{at + 1}"} for name in "xy"},
        }
        for side in "ab"
        for at in range(40)
    }
    defs: dict[str, Any] = levels | {"a40": {}, "b40": {}}
    with notices.collected() as noted:
        json_schema({"oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}], "$defs": defs}, field="format")
    assert len(noted) == 1


def test_a_long_list_is_not_written_again_for_each_reference_to_it() -> None:
    values = {"enum": [str(number) for number in range(9_000)]}
    properties = {f"p{at}": {"$ref": "#/$defs/e", "type": "string"} for at in range(500)}
    assert json_schema({"$defs": {"e": values}, "properties": properties}, field="format")
