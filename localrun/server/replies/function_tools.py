"""Tools and tool choices, as clients of `/v1` write them.

Function tools have three spellings: chat's (`{"type": "function", "function": {...}}`), the older `functions` of chat,
and that of responses (`{"type": "function", "name": ...}`). All become the same `Tool`.

Pure. Does not: put tools into a prompt, or constrain a call (`replies` does).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.replies.chat_ask import Tool, ToolChoice

MAX_TOOLS = 512

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool is, without its type."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of chat's `tools`."""

    type: str = "function"
    function: Function | None = None


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    """A function, named."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """`allowed_tools`: some of the tools, and whether one of them must be called."""

    tools: list[dict[str, Any]]
    mode: Literal["auto", "required"] = "auto"


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A `tool_choice` that is an object, in chat's spelling or in that of responses."""

    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    tools: list[dict[str, Any]] | None = None
    mode: Literal["auto", "required"] = "auto"


Choice = Literal["auto", "none", "required"] | NamedChoice
ChatTools = Annotated[list[ChatTool], Meta(max_length=MAX_TOOLS)]
Functions = Annotated[list[Function], Meta(max_length=MAX_TOOLS)]


def from_chat(tools: Sequence[ChatTool]) -> tuple[Tool, ...]:
    """Of chat's `tools`. Raises BadRequest naming the tool."""
    functions = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise BadRequest(
                f"{where}.type: {tool.type[:40]!r} tools are not supported; describe it as a function",
                field=f"{where}.type",
            )
        if tool.function is None:
            raise BadRequest(f"{where}.function is required", field=f"{where}.function")
        functions.append((f"{where}.function", tool.function))
    return checked(functions)


def from_functions(functions: Sequence[Function]) -> tuple[Tool, ...]:
    """Of chat's older `functions`. Raises BadRequest naming the function."""
    return checked([(f"functions[{index}]", function) for index, function in enumerate(functions)])


def checked(functions: Sequence[tuple[str, Function]]) -> tuple[Tool, ...]:
    """Of (where it stands in the body, function). Raises BadRequest for a bad name, and for the same name twice."""
    tools: dict[str, Tool] = {}
    for where, function in functions:
        if not _NAME.fullmatch(function.name):
            raise BadRequest(
                f"{where}.name: {function.name[:40]!r} is not a function's name; use up to 128 of A-Z, a-z, 0-9 and "
                f"_ . : / -",
                field=f"{where}.name",
            )
        if function.name in tools:
            raise BadRequest(f"{where}.name: {function.name!r} is there twice", field=f"{where}.name")
        tools[function.name] = Tool(
            function.name, function.description or "", _NO_ARGUMENTS | (function.parameters or {})
        )
    return tuple(tools.values())


def choose(
    choice: Choice | None, tools: tuple[Tool, ...], *, field: str = "tool_choice"
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and whether one must be. Raises BadRequest for a choice that the tools do not
    allow."""
    if choice is None:
        return tools, "auto"
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise BadRequest(f"{field}: 'required' needs tools; send some, or leave {field} out", field=field)
        return tools, choice
    if choice.type == "allowed_tools":
        return _allowed(choice, tools, field)
    name = choice.function.name if choice.function is not None else choice.name
    if choice.type != "function" or name is None:
        raise BadRequest(
            f"{field}: use 'auto', 'none', 'required', or an object that names a function of tools", field=field
        )
    _check_known([name], tools, field)
    return tools, ("function", name)


def _allowed(choice: NamedChoice, tools: tuple[Tool, ...], field: str) -> tuple[tuple[Tool, ...], ToolChoice]:
    inner = choice.allowed_tools or AllowedTools(tools=choice.tools or [], mode=choice.mode)
    names = [_name_of(tool) for tool in inner.tools]
    _check_known(names or [""], tools, field)
    return tuple(tool for tool in tools if tool.name in names), inner.mode


def _name_of(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", ""))


def _check_known(names: Sequence[str], tools: tuple[Tool, ...], field: str) -> None:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            listed = ", ".join(sorted(known))[:200] or "none was sent"
            raise BadRequest(f"{field}: {name[:128]!r} is not one of the tools ({listed})", field=field)
