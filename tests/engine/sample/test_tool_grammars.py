"""Tool schemas that only the grammar library refuses: a call that may come is freed, one that must come is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from localrun.server.parsing import formats
from localrun.server.prompting import constraint
from localrun.server.prompting.ask import Tool
from localrun.wire import Finish, Grammar
from tests.engine.harness import Harness, expected_output

DIGITS = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^[0-9]{3}$"}}, "required": ["n"]}
BROKEN = [
    ({"enum": ["a"]}, "parameters: Unsatisfiable schema: incompatible types"),
    (
        {"properties": {"q": {"type": "array", "items": {"type": "string", "pattern": "("}}}},
        "parameters.properties.q.items: regex parse error: ( ^ error: unclosed group",
    ),
    (
        {"properties": {"a": {"type": "string"}, "q": {"type": "object", "enum": ["a"]}}, "required": ["q"]},
        "parameters.properties.q: Unsatisfiable schema: incompatible types",
    ),
    (
        {"properties": {"q": {"$ref": "#/$defs/part"}}, "$defs": {"part": {"type": "string", "pattern": "("}}},
        "parameters.properties.q.#/$defs/part: regex parse error",
    ),
]
EACH = pytest.mark.parametrize(("schema", "problem"), BROKEN, ids=lambda value: str(value)[:20])


def tools(*schemas: dict[str, Any]) -> list[Tool]:
    return [Tool(f"tool {index}", "", schema) for index, schema in enumerate(schemas)]


def lazy(offered: Sequence[Tool], *, trigger: str) -> Grammar:
    written = formats.HERMES.written
    grammar = constraint.lazy_calls(written, offered, is_one=False)
    assert grammar is not None
    return Grammar(grammar.kind, grammar.text, (trigger,))


def answer(grammar: Grammar) -> Harness:
    harness = Harness(n_cells=2048)
    harness.submit(1, "prompt", n_predict=400, grammar=grammar)
    harness.run()
    return harness


@EACH
def test_a_call_that_need_not_come_takes_any_object(schema: dict[str, Any], problem: str):
    free = bytes(expected_output(list(b"prompt"), 20)).decode("utf-8", "replace")
    harness = answer(lazy(tools(schema), trigger=free[5]))
    assert harness.finals[1].finish in (Finish.STOP, Finish.LENGTH), harness.finals[1].error_message
    _, _, call = harness.texts[1].partition(free[5])
    assert call.startswith('\n{"name": "tool 0", "arguments": {')
    (line,) = harness.notices[1]
    assert line.startswith(f"the tool 'tool 0': {problem}")
    assert line.endswith("its calls take any object")


def test_the_other_tools_keep_their_schemas():
    free = bytes(expected_output(list(b"prompt"), 20)).decode("utf-8", "replace")
    grammar = lazy(tools({"enum": ["a"]}, DIGITS), trigger=free[5])
    grammar = Grammar(grammar.kind, grammar.text.replace("call: call_0 | call_1", "call: call_1"), grammar.triggers)
    _, _, call = answer(grammar).texts[1].partition(free[5])
    value = json.loads(call.partition("\n</tool_call>")[0])
    assert value["name"] == "tool 1"
    assert len(value["arguments"]["n"]) == 3


@EACH
def test_a_call_that_must_come_is_refused_by_the_tool_and_the_path(schema: dict[str, Any], problem: str):
    written = formats.HERMES.written
    harness = answer(constraint.forced_calls(written, tools(DIGITS, schema), is_one=False))
    assert harness.finals[1].error_code == "bad_request"
    assert (harness.finals[1].error_message or "").startswith(f"the tool 'tool 1': {problem}")


def test_a_value_in_tags_whose_schema_does_not_compile_may_be_any():
    parameters = {"type": "object", "properties": {"n": {"type": "integer", "enum": ["a"]}}, "required": ["n"]}
    written = formats.QWEN_CODER.written
    grammar = constraint.lazy_calls(written, [Tool("count", "", parameters)], is_one=False)
    assert grammar is not None
    free = bytes(expected_output(list(b"prompt"), 20)).decode("utf-8", "replace")
    harness = answer(Grammar(grammar.kind, grammar.text, (free[5],)))
    assert harness.finals[1].finish is not Finish.ERROR, harness.finals[1].error_message
    (notice,) = harness.notices[1]
    assert notice.startswith("the tool 'count': parameters.properties.n: ")
    _, _, call = harness.texts[1].partition(free[5])
    assert call.startswith("\n<function=count>\n<parameter=n>\n")
