"""Bodies of /v1/messages: what is asked of the model, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.anthropic.body import MessagesBody
from localrun.server.http.exchange import decode_body
from localrun.server.prompting.ask import MAX_MESSAGES
from localrun.wire import GrammarKind

HELLO = [{"role": "user", "content": "hi"}]
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"a": {}}}}
GUESS = {"name": "guess", "type": "custom", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}


def body(**fields: Any) -> MessagesBody:
    content = {"model": "m", "max_tokens": 2000, "messages": HELLO} | fields
    decoded = decode_body(json.dumps(content).encode(), MessagesBody)
    decoded.check_supported()
    return decoded


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "adaptive", "budget_tokens": 0}}, None),
        ({"thinking": {"type": "disabled", "budget_tokens": 100_000}}, False),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}}, "max"),
        ({"output_config": {"effort": "low"}}, False),
    ],
)
def test_thinking(fields: dict[str, Any], expected: bool | str | None) -> None:
    assert body(**fields).ask().think == expected


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "guess"}, ("function", "guess"), True),
        ({"type": "none"}, "none", True),
    ],
)
def test_tools_and_choices(choice: Any, expected: Any, parallel: bool) -> None:
    ask = body(tools=[LOOK, GUESS], tool_choice=choice).ask()
    assert [(tool.name, tool.description) for tool in ask.tools] == [("look", "Looks."), ("guess", "")]
    assert ask.tools[0].parameters["properties"] == {"a": {}}
    assert (ask.tool_choice, ask.parallel_calls) == (expected, parallel)


def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}


def by_name(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


WAIT = LOOK | {"name": "wait"}


@pytest.mark.parametrize(
    ("changes", "names", "said"),
    [
        ([change("addition", by_name("guess"))], ["look", "guess"], "Loaded: guess"),
        ([change("removal", by_name("look"))], ["guess"], "Removed: look"),
        ([change("removal", by_name("look")), change("addition", by_name("look"))], ["look", "guess"], "Loaded: look"),
        (
            [change("addition", {"type": "tool_definition", "definition": WAIT})],
            ["look", "guess", "wait"],
            "Loaded: wait",
        ),
        (
            [change("addition", {"type": "tool_definition", "definition": GUESS | {"description": "Anew."}})],
            ["look", "guess"],
            "Loaded: guess",
        ),
        ([change("addition", {"type": "of_2027"})], ["look", "guess"], "Loaded: a tool"),
    ],
)
def test_tools_come_and_go_in_the_middle(changes: list[Any], names: list[str], said: str) -> None:
    ask = body(tools=[LOOK, GUESS | {"defer_loading": True}], messages=[*HELLO, *changes]).ask()
    assert [tool.name for tool in ask.tools] == names
    assert ask.messages[-1] == {"role": "system", "content": said}
    assert "Anew." not in str(changes) or ask.tools[1].description == "Anew."


def test_a_prefix_of_the_answer() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert body(messages=begun).ask().continue_last
    assert not body().ask().continue_last


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_of_the_answer(field: str) -> None:
    schema = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    grammar = body(**{field: {"format": schema} if field == "output_config" else schema}).ask().response_grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert "integer" in grammar.text


def test_what_is_about_another_service_passes() -> None:
    body(
        metadata={"user_id": "x"}, service_tier="auto", container="c", context_management={"edits": []},
        mcp_servers=[], cache_control={"type": "ephemeral"}, inference_geo="us", speed=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [LOOK | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        (
            {"messages": [*HELLO, change("addition", {"definition": {"name": "x"}})]},
            "messages[1].content[0].tool.definition.input_schema",
        ),
        ({"messages": [*HELLO, change("addition", {"definition": 1})]}, "messages[1].content[0].tool.definition"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "object", "requred": ["a"]}}},
            "output_format.schema",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look"}]}]},
            "messages",
        ),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "x"}],
                "tools": [LOOK],
                "tool_choice": {"type": "any"},
            },
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        body(**fields).ask()
    assert caught.value.field == field


def test_max_tokens_is_required() -> None:
    with pytest.raises(BadRequest, match="max_tokens is required"):
        decode_body(json.dumps({"model": "m", "messages": HELLO}).encode(), MessagesBody)


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}])
def test_a_tool_of_anthropic_s_cannot_be_forced(choice: dict[str, str]) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    with pytest.raises(BadRequest, match=r"^tool_choice(\.name)?: 'web_search' \(web_search_20250305\).*not run; send"):
        body(tools=[search], tool_choice=choice).ask()


def test_a_choice_of_one_tool_needs_its_name() -> None:
    with pytest.raises(BadRequest, match=r"^tool_choice.name is required$"):
        body(tools=[LOOK], tool_choice={"type": "tool"}).ask()


def test_a_conversation_has_a_most_of_messages() -> None:
    assert len(body(messages=HELLO * MAX_MESSAGES).messages) == MAX_MESSAGES
    with pytest.raises(BadRequest, match=f"{MAX_MESSAGES}") as wrong:
        body(messages=HELLO * (MAX_MESSAGES + 1))
    assert wrong.value.field == "messages"
