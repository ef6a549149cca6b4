"""What only compiling shows that the library cannot do with a schema: it is left out and said, or refused if strict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.server.parsing import formats
from localrun.server.prompting import constraint
from localrun.server.prompting.ask import Tool
from localrun.server.structured import json_schema
from localrun.wire import Finish, Grammar
from tests.engine.harness import Harness
from tests.says import says

# Words of at most so many letters: the library comes to no end with both after one letter.
COUNTED = {"type": "string", "minLength": 1, "maxLength": 5000, "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)"}
AGAIN = {"$ref": "#/$defs/node"}
KINDS = [
    (COUNTED, "maxLength: left out"),
    ({"type": "string", "pattern": "^$[a-z]*b"}, "pattern: left out"),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "string"}, "a$": {"type": "integer"}}},
        "patternProperties: left out",
    ),
    ({"type": "object", "patternProperties": dict.fromkeys(("^a", "a$"), AGAIN)}, "patternProperties: left out"),
    ({"anyOf": [{"type": "null"}, {**AGAIN, "properties": {"q": {"type": "null"}}}]}, "properties: left out"),
    ({"type": ["object", "null"], "anyOf": [{"type": "null"}, AGAIN]}, "type: left out"),
]


def whole(schema: dict[str, Any]) -> dict[str, Any]:
    node = {"type": "object", "properties": {"q": schema}, "required": ["q"], "additionalProperties": False}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def answer(grammar: Grammar) -> Harness:
    harness = Harness(n_cells=2048)
    harness.submit(1, "prompt", n_predict=40, grammar=grammar)
    harness.run()
    return harness


@pytest.mark.parametrize(("schema", "said"), KINDS)
def test_it_is_left_out_and_said_or_refused_if_strict(schema: dict[str, Any], said: str):
    harness = answer(json_schema(whole(schema), field="format"))
    assert harness.finals[1].finish in (Finish.LENGTH, Finish.STOP), harness.finals[1].error_message
    assert harness.texts[1].startswith("{")
    assert any("properties.q" in notice and said in notice for notice in harness.notices[1]), harness.notices
    strict = answer(json_schema(whole(schema), field="format", strict=True)).finals[1]
    assert strict.error_code == "bad_request"
    assert says(strict.error_message, "schema.", "q")


def test_the_rest_of_the_schema_is_enforced():
    schema = {"type": "object", "properties": {"n": {"enum": [7]}, "q": {"pattern": "^$b"}}, "required": ["n"]}
    text = answer(json_schema(schema, field="format")).texts[1]
    assert text.replace(" ", "").replace("\n", "").startswith('{"n":7')


def test_so_is_the_rest_of_a_tool_s_whether_its_call_must_come_or_may():
    schema = {"type": "object", "properties": {"q": {"type": "string", "pattern": "^$b"}, "n": {"enum": [7]}}}
    tool = Tool("look", "", schema | {"required": ["q", "n"], "additionalProperties": False})
    written = formats.HERMES.written
    forced = answer(constraint.forced_calls(written, [tool], is_one=True))
    assert forced.finals[1].finish is not Finish.ERROR
    (notice,) = forced.notices[1]
    assert notice.startswith("the tool 'look': ")
    assert says(notice, "properties.q.pattern")
    strict = Tool("look", "", tool.parameters, is_strict=True)
    refused = answer(constraint.forced_calls(written, [strict], is_one=True)).finals[1]
    assert says(refused.error_message, "look", "properties.q")


def test_who_asks_again_for_the_same_grammar_is_told_again():
    grammar = json_schema(whole(COUNTED), field="format")
    harness = Harness(n_cells=2048)
    for number in range(2):
        harness.submit(number, f"prompt {number}", n_predict=5, grammar=grammar)
        harness.run()
    assert harness.notices[0] == harness.notices[1] != ()
    assert json.dumps(harness.notices[0]).count("maxLength") == 1
