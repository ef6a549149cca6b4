"""Anthropic's tools and tool choices.

Pure. Does not: put tools into a prompt, or constrain a call (`replies` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.prompting.ask import MAX_TOOLS, Function, Tool, ToolChoice, checked_tools


class AskedTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tools`. Those that Anthropic defines or runs have a type with a date and no schema."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AskedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


AskedTools = Annotated[list[AskedTool], Meta(max_length=MAX_TOOLS)]


def tools_of(tools: Sequence[AskedTool]) -> tuple[Tool, ...]:
    """Raises BadRequest naming the tool."""
    functions = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise BadRequest(
                f"{where}.type: {str(tool.type)[:40]!r} is a tool of Anthropic's own, which is not here; leave it out, "
                f"or describe it with an input_schema",
                field=f"{where}.type",
            )
        if tool.input_schema is None:
            raise BadRequest(f"{where}.input_schema is required", field=f"{where}.input_schema")
        described = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
        functions.append((where, described))
    return checked_tools(functions)


def choice_of(choice: AskedChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """Raises BadRequest for a choice that the tools do not allow."""
    if choice is None or choice.type in ("auto", "none"):
        return "auto" if choice is None or choice.type == "auto" else "none"
    if not tools:
        raise BadRequest(
            f"tool_choice: {choice.type!r} needs tools; send some, or leave tool_choice out", field="tool_choice"
        )
    if choice.type == "any":
        return "required"
    if choice.name not in {tool.name for tool in tools}:
        listed = ", ".join(tool.name for tool in tools)[:200]
        raise BadRequest(
            f"tool_choice.name: {str(choice.name)[:128]!r} is not one of the tools ({listed})",
            field="tool_choice.name",
        )
    return ("function", choice.name)
