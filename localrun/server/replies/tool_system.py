"""Tools for a model whose template does not describe any: as text in the system message.

The calls are asked for in the model's own format where its template knows one, else as Hermes models write them, which
most models have seen.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localrun.server.jobs.prompt import Message
from localrun.server.replies import formats
from localrun.server.replies.formats import CallFormat, Written
from localrun.server.replies.json_text import dump

# A small model goes on and invents the tool's answer; the client has the real one.
STOP_AT_RESULT = ("<tool_response>",)


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], call_format: CallFormat
) -> list[Message]:
    """The messages with the tools described at the end of the first system message, or in a new one before all."""
    written = call_format.written or formats.HERMES.written
    assert written is not None
    text = "\n".join(
        (
            "# Tools",
            "",
            "These functions may be called to help the user, one JSON description on each line:",
            "<tools>",
            *(dump(tool) for tool in tools),
            "</tools>",
            "",
            "To call a function, write nothing but the call, with its arguments as JSON:",
            example(written),
            "The result comes in the next message. When no function is needed, answer the user directly.",
        )
    )
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        joined = "\n\n".join(part for part in (first.get("content") or "", text) if part)
        return [{**first, "content": joined}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with a description, empty if need be, on every parameter: Command-R's template fails without."""
    function = dict(tool["function"])
    function["parameters"] = _described(function["parameters"])
    return {**tool, "function": function}


def _described(schema: Any, depth: int = 0) -> Any:
    if not isinstance(schema, Mapping) or depth > 16:
        return schema
    made = {"description": "", **schema} if depth else dict(schema)
    properties = made.get("properties")
    if isinstance(properties, Mapping):
        made["properties"] = {name: _described(value, depth + 1) for name, value in properties.items()}
    return made


def example(written: Written) -> str:
    """A call as it should be written, with placeholders."""
    before = written.before.replace("NAME", "function name")
    return f"{written.opening}{written.lead}{before}{{arguments}}{written.after}{written.closing}"
