"""Whatever the schema and whatever the model would like to write: a finished answer parses and matches."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun.errors import BadRequest
from localrun.server.structured import CallShape, calls, json_schema
from localrun.server.structured.schema import KEYWORDS
from localrun.wire import Finish
from tests.depth import DEPTH
from tests.engine.harness import Harness

NAMES = st.sampled_from(["a", "name", "not", 'quo"te', "größe", "x/y~z"])


def strings() -> st.SearchStrategy[Any]:
    bounds = st.tuples(st.integers(0, 3), st.integers(3, 12)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}
    )
    patterns = st.sampled_from(["^[a-c]{2,4}$", "^(yes|no)$", "[0-9]+x"])
    return st.one_of(
        st.just({"type": "string"}), bounds, patterns.map(lambda pattern: {"type": "string", "pattern": pattern})
    )


def numbers() -> st.SearchStrategy[Any]:
    between = st.tuples(st.integers(-1000, 0), st.integers(1, 1000), st.sampled_from(["integer", "number"])).map(
        lambda made: {"type": made[2], "minimum": made[0], "exclusiveMaximum": made[1]}
    )
    return st.one_of(between, st.just({"type": "integer", "multipleOf": 7}), st.just({"type": ["number", "null"]}))


def values() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"enum": ["red", 3, None, {"k": [1]}]}),
        st.just({"const": 'a "quoted" word'}),
        st.just({"$ref": "#/$defs/tree"}),
    )


def objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], n_required: int, rest: Any) -> dict[str, Any]:
        made = {"type": "object", "properties": properties, "required": list(properties)[:n_required]}
        return made if rest is None else {**made, "additionalProperties": rest}

    rest = st.sampled_from([None, False, {"type": "integer"}])
    return st.builds(build, st.dictionaries(NAMES, schemas, max_size=4), st.integers(0, 4), rest)


def composed(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.tuples(schemas, st.integers(0, 2), st.integers(2, 4)).map(
        lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[2]}
    )
    tuples = st.lists(schemas, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    alternatives = st.lists(schemas, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(objects(schemas), arrays, tuples, alternatives)


SCHEMAS = st.recursive(st.one_of(strings(), numbers(), values()), composed, max_leaves=8)
TREE = {
    "type": "object",
    "properties": {"leaf": {"type": "boolean"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["leaf"],
}


# What programs write into schemas, in places where it belongs and where it does not.
WORDS = st.sampled_from([*sorted(KEYWORDS), "nullable", "additionalItems", "not", "propertyNames", "id", "$anchor"])
ODD = st.sampled_from(
    [None, True, False, 0, -1, 2.5, 2**70, "a", "#", "#/properties/a", "#x", "string", "any", "OBJECT", "date", "(?=x)"]
)
ANYTHING = st.recursive(
    ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(WORDS, st.sampled_from("ab")), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200 * DEPTH, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(WORDS, ANYTHING, max_size=5), st.booleans())
def test_any_object_is_a_schema_or_refused_by_its_path(schema: Any, strict: bool):
    refusal = "format: none"
    try:
        json.loads(json_schema(schema, field="format", strict=strict).text)
    except BadRequest as error:
        refusal = error.message
    assert refusal.startswith("format")


def finished(harness: Harness) -> bool:
    final = harness.finals[1]
    assert final.error_message is None
    return final.finish is Finish.STOP


@settings(max_examples=15 * DEPTH, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS, st.text(max_size=5))
def test_every_finished_answer_matches_its_schema(schema: Any, prompt: str):
    schema = {**schema, "$defs": {"tree": TREE}}
    harness = Harness(n_cells=2048)
    harness.submit(1, "p" + prompt, n_predict=1500, grammar=json_schema(schema, field="format"))
    harness.run()
    if finished(harness):
        jsonschema.validate(json.loads(harness.texts[1]), schema)


@settings(max_examples=12 * DEPTH, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(objects(SCHEMAS), min_size=1, max_size=3), st.booleans(), st.text(max_size=5))
def test_every_finished_list_of_calls_can_be_read(schemas: list[Any], is_one: bool, prompt: str):
    schemas = [{**schema, "$defs": {"tree": TREE}} for schema in schemas]
    opening = '<call>{"name": "f%d", "arguments": '
    shapes = [CallShape(opening % number, schema, "}</call>") for number, schema in enumerate(schemas)]
    harness = Harness(n_cells=2048)
    grammar = calls(shapes, is_one=is_one, separator="\n", before="<|im_start|>", after="\n")
    harness.submit(1, "p" + prompt, n_predict=1500, grammar=grammar)
    harness.run()
    if finished(harness):
        read = harness.texts[1].strip("\n").removeprefix("<call>").removesuffix("</call>").split("</call>\n<call>")
        assert len(read) == 1 or not is_one
        for call in map(json.loads, read):
            jsonschema.validate(call["arguments"], schemas[int(call["name"][1:])])
