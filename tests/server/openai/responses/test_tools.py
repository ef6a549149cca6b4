"""Tools of other kinds than functions: what a model is offered of them, and what their calls are to the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.openai.responses.items import Client, input_of, offered
from localrun.server.prompting.ask import AllowedTools, FunctionName, NamedChoice, choose_tools

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}
WEATHER = {"type": "namespace", "name": "mcp__wx", "description": "The weather.", "tools": [NOW]}
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}  # fmt: skip
# As openai/codex#36942 shows them, and one that is not there yet.
HOSTED = [
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_2025_08_26"},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "x"},
    {"type": "tool_search"},
    {"type": "telepathy_2027"},
]


def test_what_a_model_cannot_call_is_left_out_and_named() -> None:
    found = offered([*HOSTED, LOOK])
    assert [tool.name for tool in found.tools] == ["look"]
    assert found.written == [LOOK]
    assert found.left_out == [f"tools[{at}] ({tool['type']})" for at, tool in enumerate(HOSTED)]


def test_functions_of_a_namespace_are_offered_and_their_names_come_back_apart() -> None:
    found = offered([WEATHER, LOOK])
    assert [tool.name for tool in found.tools] == ["mcp__wx__now", "look"]
    call = found.clients["mcp__wx__now"].call("fc_1", "call_1")
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__wx", "now")
    assert "namespace" not in found.clients["look"].call("fc_2", "call_2")
    assert found.written == [WEATHER, LOOK]


def test_the_same_function_in_two_namespaces_is_two_functions() -> None:
    tools = offered([WEATHER, WEATHER | {"name": "mcp__sea"}, NOW]).tools
    assert [tool.name for tool in tools] == ["mcp__wx__now", "mcp__sea__now", "now"]


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    found = offered([PATCH])
    [tool] = found.tools
    assert (tool.name, list(tool.parameters["properties"])) == ("apply_patch", ["input"])
    assert tool.parameters["required"] == ["input"]
    assert tool.description == 'Edits files.\n\nThe input follows this lark grammar:\nstart: "*** Begin Patch"'
    assert found.clients["apply_patch"] == Client("apply_patch", is_custom=True)
    assert found.clients["apply_patch"].call("ctc_1", "call_1")["type"] == "custom_tool_call"


@pytest.mark.parametrize("text", ["", '*** Begin Patch\n+\u2603 "x"\n', "{}"])
def test_the_text_of_a_custom_tool_survives_its_arguments(text: str) -> None:
    assert input_of(json.dumps({"input": text}, ensure_ascii=False)) == text


@pytest.mark.parametrize("arguments", ['{"input": "half', "[1]", "{}", '{"input": 1}', "null"])
def test_arguments_that_are_no_text_are_handed_on_as_they_are(arguments: str) -> None:
    assert input_of(arguments) == arguments


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"type": "function"}], "tools[0]"),
        ([{"type": "function", "name": "a b"}], "tools[0].name"),
        ([LOOK, LOOK], "tools[1].name"),
        ([{"type": "custom"}], "tools[0]"),
        ([{"type": "custom", "name": 1}], "tools[0]"),
        ([{"type": "namespace", "tools": [NOW]}], "tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": [NOW, 1]}], "tools[0].tools[1]"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0]"),
    ],
)
def test_what_is_malformed_is_refused_by_its_place(tools: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        offered(tools)
    assert refused.value.field == field


def test_a_namespace_in_a_namespace_and_one_without_tools_are_left_out() -> None:
    inner = {"type": "namespace", "name": "inner", "tools": [NOW]}
    found = offered([{"type": "namespace", "name": "outer", "tools": [inner, NOW]}, {"type": "namespace", "name": "x"}])
    assert [tool.name for tool in found.tools] == ["outer__now"]
    assert found.left_out == ["tools[0].tools[0] (namespace)", "tools[1] (namespace)"]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (None, "auto"),
        ("required", "required"),
        (NamedChoice(name="look"), ("function", "look")),
        (NamedChoice(function=FunctionName(name="look")), ("function", "look")),
        (NamedChoice(name="now", namespace="mcp__wx"), ("function", "mcp__wx__now")),
        (NamedChoice(type="custom", name="apply_patch"), ("function", "apply_patch")),
        (NamedChoice(type="web_search"), "auto"),
        (NamedChoice(type="mcp", name="x"), "auto"),
        (NamedChoice(type="allowed_tools", tools=[{"type": "web_search"}], mode="required"), "auto"),
        (NamedChoice(type="allowed_tools", tools=[{"type": "web_search"}, LOOK], mode="required"), "required"),
        (NamedChoice(type="allowed_tools", allowed_tools=AllowedTools(tools=[{"type": "custom", "name": "apply_patch"}],
                                                                      mode="auto")), "auto"),
    ],
)  # fmt: skip
def test_a_choice_is_by_the_client_s_names(choice: Any, chosen: Any) -> None:
    found = offered([WEATHER, LOOK, PATCH, {"type": "web_search"}])
    assert choose_tools(found.choice(choice), found.tools)[1] == chosen


def test_a_choice_of_a_function_that_was_not_sent_is_a_mistake() -> None:
    found = offered([LOOK])
    for name in ("see", None):
        with pytest.raises(BadRequest):
            choose_tools(found.choice(NamedChoice(name=name)), found.tools)
