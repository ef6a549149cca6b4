"""OpenAI's chat messages, as chat templates want them.

Pure. Does not: render a template, or look at what the model can do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from localrun.errors import BadRequest
from localrun.server.prompting.ask import Message

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call. `arguments` is JSON text; some clients send the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One of an assistant's `tool_calls`."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`. `content` is text, or parts of which each has its own type."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    prefix: bool | None = None


def for_template(messages: Sequence[ChatMessage]) -> list[Message]:
    """Raises BadRequest naming the message."""
    if not messages:
        raise BadRequest("messages: at least one message is required", field="messages")
    result: list[Message] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        result.append(_for_template(message, f"messages[{index}]", names))
    return result


def arguments_of(text: str | dict[str, Any] | None, field: str) -> dict[str, Any]:
    """A call's arguments as templates take them. Raises BadRequest for what is not a JSON object."""
    if isinstance(text, dict):
        return text
    try:
        parsed = json.loads(text) if text and text.strip() else {}
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise BadRequest(f"{field}: must be the text of a JSON object", field=field)
    return parsed


def text_of(content: str | Sequence[dict[str, Any]] | None, where: str) -> str:
    """Templates of text models take one text; llama-server and vLLM join parts in the same way. Raises BadRequest for
    a part that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _for_template(message: ChatMessage, where: str, names: dict[str, str]) -> Message:
    """`names` of the calls so far, by id: a tool's answer is told which function it answers for."""
    role = _ROLES.get(message.role)
    if role is None:
        raise BadRequest(
            f"{where}.role: {message.role[:40]!r} is not a role; use {', '.join(_ROLES)}", field=f"{where}.role"
        )
    made: Message = {"role": role, "content": text_of(message.content, f"{where}.content")}
    if role == "assistant":
        return made | _assistant(message, where, names)
    if role == "tool":
        made["tool_call_id"] = message.tool_call_id or message.name or ""
        made["name"] = message.name or names.get(made["tool_call_id"], "")
    return made


def _assistant(message: ChatMessage, where: str, names: dict[str, str]) -> Message:
    made: Message = {}
    if message.refusal and not message.content:
        made["content"] = message.refusal
    thinking = message.reasoning_content or message.reasoning
    if thinking:
        made["thinking"] = thinking
    calls = message.tool_calls or []
    if message.function_call is not None:
        # The answer to an older call names the function, and has no id.
        calls = [ToolCall(id=message.function_call.name, function=message.function_call)]
    if calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{at}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(call.function.arguments, f"{where}.tool_calls[{at}].function.arguments"),
                },
            }
            for at, call in enumerate(calls)
        ]
        names.update({call["id"]: call["function"]["name"] for call in made["tool_calls"]})
    return made


def _part_text(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    text = part.get("text") if kind in _TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise BadRequest(f"{where}: {str(kind)[:40]!r} parts are not supported by this model; send text", field=where)
    if not isinstance(text, str):
        raise BadRequest(f"{where}.text: expected a text", field=f"{where}.text")
    return text
