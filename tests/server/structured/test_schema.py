"""Which JSON schemas are taken, and how the others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.structured import json_object, json_schema
from localrun.server.structured.schema import MAX_SUBSCHEMAS, checked
from tests.says import says


def refusal(schema: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        json_schema(schema, field="format")
    assert caught.value.field == "format"
    return caught.value.message


def test_the_library_s_own_switch_is_no_keyword():
    assert says(refusal({"x-guidance": {"lenient": True}}), "format: ", "'x-guidance'", "not supported")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], ["format"]),
        ({"type": "strin"}, ["format.type:", "array, boolean"]),
        ({"type": []}, ["format.type:"]),
        ({"anyOf": {}}, ["format.anyOf:"]),
        ({"anyOf": [3]}, ["format.anyOf[0]:"]),
        ({"properties": [1]}, ["format.properties:"]),
        ({"format": 3}, ["format.format:"]),
        ({"pattern": 3}, ["format.pattern:"]),
        ({"minItems": 10**9}, ["format.minItems:", 0, 1000000]),
        ({"minLength": -1}, ["format.minLength:", 0]),
        ({"minimum": "1"}, ["format.minimum:"]),
        ({"maximum": float("inf")}, ["format.maximum:"]),
        ({"minLength": 10**400}, ["format.minLength:"]),
        ({"multipleOf": 0}, ["format.multipleOf:"]),
        ({"const": float("nan")}, ["format", "number"]),
        ({"enum": []}, ["format.enum:", 1]),
        ({"required": "a"}, ["format.required:"]),
        ({"$ref": "#/$defs/missing"}, ["format:", '"$ref"', "'#/$defs/missing'"]),
        ({"$ref": "#"}, ["format:", '"$ref"', "'#'"]),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"}, ["'#/$defs/a'"]),
    ],
)
def test_a_value_that_a_keyword_cannot_have_is_refused(schema: Any, said: list[object]):
    assert says(refusal(schema), *said)


def test_what_looks_like_look_around_is_a_pattern():
    for pattern in (r"\(?=", r"\\b", r"[(?=]", r"\\1", r"(?:a)(?<name>b)", r"[\]\1]?"):
        assert checked({"pattern": pattern}, field="format") == {"pattern": pattern}


def test_bombs_are_refused_before_anybody_compiles_them():
    deep: Any = {"type": "string"}
    for _ in range(100):
        deep = {"items": deep}
    assert "64 levels" in refusal(deep)
    assert f"more than {MAX_SUBSCHEMAS} parts" in refusal({"anyOf": [{"const": n} for n in range(MAX_SUBSCHEMAS)]})
    assert "1000 properties" in refusal({"properties": {str(n): {} for n in range(1001)}})
    nested: Any = 1
    for _ in range(20_000):
        nested = [nested]
    assert "nested too deeply" in refusal({"const": nested})
    assert "the limit is" in refusal({"enum": ["x" * 200_000, "y" * 200_000]})


def test_annotations_are_fine_and_make_no_other_grammar():
    plain = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    noted = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A book",
        "description": "what it is",
        "type": "object",
        "properties": {"title": {"type": "string", "examples": ["Emma"], "default": "", "x-order": 1}},
        "required": ["title"],
    }
    assert json_schema(noted, field="format") == json_schema(plain, field="format")


def test_a_property_may_be_called_as_a_keyword():
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "default": {"type": "integer"}}}
    assert list(checked(schema, field="format")["properties"]) == ["not", "default"]


def test_the_order_of_properties_is_kept():
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}}
    assert list(json.loads(json_schema(schema, field="format").text)["properties"]) == ["z", "a", "m"]


def test_an_object_that_lists_its_properties_gets_no_others():
    schema = {
        "properties": {"a": {"properties": {"b": {}}}, "c": {"additionalProperties": True, "properties": {"d": {}}}}
    }
    closed = checked(schema, field="format")
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["c"]["additionalProperties"] is True
    assert "additionalProperties" not in checked({"type": "object"}, field="format")


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"properties": {"b": {}}}}},
        {"properties": {"a": {}}, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}}}},
    ],
)
def test_nothing_is_closed_where_two_schemas_describe_one_object(schema: Any):
    assert "additionalProperties" not in json.dumps(checked(schema, field="format"))


def test_json_mode_is_any_object():
    assert json.loads(json_object().text)["type"] == "object"


def check(schema: dict[str, Any]) -> dict[str, Any]:
    return checked(schema, field="format")


def chain(step: Callable[[dict[str, str]], dict[str, Any]], n: int) -> dict[str, Any]:
    """`n` definitions, each of which refers to the next one."""
    defs: dict[str, Any] = {f"a{at}": step({"$ref": f"#/$defs/a{at + 1}"}) for at in range(n)}
    return {"$defs": defs | {f"a{n}": {"type": "string"}}, "$ref": "#/$defs/a0"}


STEPS: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "itself": lambda ref: dict(ref),
    "items": lambda ref: {"type": "array", "items": ref},
    "anyOf": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "property": lambda ref: {"type": "object", "properties": {"x": ref}, "required": ["x"]},
}


@pytest.mark.parametrize("step", STEPS)
def test_references_through_references_are_a_depth_too(step: str) -> None:
    """The compiler follows them by recursion, and 1,000 to 3,000 of them overflowed its stack."""
    refused = chain(STEPS[step], 1_000 if step != "itself" else 3_000)
    with pytest.raises(BadRequest, match="levels deep"):
        check(refused)
    assert check(chain(STEPS[step], 150))


def test_a_graph_of_references_is_no_deeper_than_its_longest_way() -> None:
    """Each to all that follow; and such as come back to themselves through a property."""
    every = {
        f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{to}"} for to in range(at + 1, 40)] or [True]} for at in range(40)
    }
    assert check({"$defs": every, "$ref": "#/$defs/a0"})
    back = {f"a{at}": {"properties": {"x": {"$ref": f"#/$defs/a{(at + 1) % 40}"}}} for at in range(40)}
    assert check({"$defs": back, "$ref": "#/$defs/a0"})


@pytest.mark.parametrize("n", [1, 2, 900])
def test_a_circle_of_references_alone_describes_nothing(n: int) -> None:
    circle = {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{(at + 1) % n}"}]} for at in range(n)}
    with pytest.raises(BadRequest, match="described by itself alone"):
        check({"$defs": circle, "type": "string"})


@pytest.mark.parametrize("ref", ["#/properties/b", "#/$defs/b", "#/properties/$ref", "#/x", "#x"])
def test_a_reference_to_what_is_no_schema_leads_nowhere(ref: str) -> None:
    with pytest.raises(BadRequest, match="leads nowhere"):
        check({"properties": {"a": {"$ref": ref}}, "$defs": {}})
