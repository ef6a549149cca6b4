"""Tools and tool choices in every spelling."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from localrun.errors import BadRequest
from localrun.server.prompting.ask import (
    ChatTool,
    Choice,
    Function,
    Tool,
    choose_tools,
    tools_of_chat,
    tools_of_functions,
)

TOOLS = (Tool("a"), Tool("b"), Tool("c"))


def choose(choice: Any, tools: tuple[Tool, ...] = TOOLS) -> tuple[list[str], Any]:
    allowed, wanted = choose_tools(msgspec.convert(choice, Choice | None), tools)
    return [tool.name for tool in allowed], wanted


def test_a_tool_without_parameters_takes_none() -> None:
    tool = ChatTool(function=Function(name="now", description="the time"))
    where = "tools[0].function.parameters"
    assert tools_of_chat([tool]) == (Tool("now", "the time", {"type": "object", "properties": {}}, field=where),)


def test_parameters_are_kept_as_they_are() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert tools_of_functions([Function(name="f", parameters=schema)])[0].parameters == schema


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 129, "a\n", 'a"'])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(BadRequest, match=r"functions\[0\]\.name"):
        tools_of_functions([Function(name=name)])


def test_the_same_name_twice() -> None:
    with pytest.raises(BadRequest, match="twice") as caught:
        tools_of_functions([Function(name="f"), Function(name="f")])
    assert caught.value.field == "functions[1].name"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (["a", "b", "c"], "auto")),
        ("auto", (["a", "b", "c"], "auto")),
        ("none", (["a", "b", "c"], "none")),
        ("required", (["a", "b", "c"], "required")),
        ({"type": "function", "function": {"name": "b"}}, (["a", "b", "c"], ("function", "b"))),
        ({"type": "function", "name": "b"}, (["a", "b", "c"], ("function", "b"))),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "c"}]},
            (["c"], "required"),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "a"}}]},
            },
            (["a"], "auto"),
        ),
    ],
)
def test_choices(choice: Any, expected: Any) -> None:
    assert choose(choice) == expected


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", ()),
        ({"type": "function", "name": "x"}, TOOLS),
        ({"type": "function"}, TOOLS),
        ({"type": "web_search"}, TOOLS),
        ({"type": "allowed_tools", "tools": []}, TOOLS),
        ({"type": "allowed_tools", "tools": [{"name": "x"}]}, TOOLS),
    ],
)
def test_choices_that_the_tools_do_not_allow(choice: Any, tools: tuple[Tool, ...]) -> None:
    with pytest.raises(BadRequest, match="tool_choice") as caught:
        choose(choice, tools)
    assert caught.value.field == "tool_choice"
