"""Anthropic's conversations as chat templates want them.

A user's message may hold results of tools beside its text: each becomes a message of its own, in its place. System
messages in the middle stay where they are, so that the prompt before them, and what is cached of it, stays the same.

Pure. Does not: render a template.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from localrun.errors import BadRequest
from localrun.server.anthropic.blocks import Block, Content, block_text, joined_texts, required, text_of
from localrun.server.prompting.ask import Message

# Claude Code puts a line for its maker's accounts before the system prompt. It is another one in every request, is not
# meant for the model, and would make every cached prefix useless.
_ACCOUNTING = "x-anthropic-billing-header:"


class AskedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`."""

    role: str
    content: Content


def conversation_of(system: Content | None, messages: Sequence[AskedMessage]) -> list[Message]:
    """Raises BadRequest naming the message or the block."""
    if not messages:
        raise BadRequest("messages: at least one message is required", field="messages")
    result: list[Message] = []
    told = system_text(system, "system")
    if told:
        result.append({"role": "system", "content": told})
    for index, message in enumerate(messages):
        result += _made(message, f"messages[{index}]")
    return result


def system_text(system: Content | None, where: str) -> str:
    """The system prompt, without what Claude Code puts before it."""
    if isinstance(system, list):
        return text_of([block for block in system if not (block.text or "").startswith(_ACCOUNTING)], where)
    if system is not None and system.startswith(_ACCOUNTING):
        return system.partition("\n")[2]
    return system or ""


def _made(message: AskedMessage, where: str) -> list[Message]:
    if message.role == "system":
        return [{"role": "system", "content": system_text(message.content, f"{where}.content")}]
    if message.role not in ("user", "assistant"):
        raise BadRequest(
            f"{where}.role: {message.role[:40]!r} is not a role; use user, assistant or system", field=f"{where}.role"
        )
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, f"{where}.content")]
    return _user(message.content, f"{where}.content")


def _user(blocks: Sequence[Block], where: str) -> list[Message]:
    result: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            result.append({"role": "user", "content": joined_texts(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type != "tool_result":
            texts.append(block_text(block, at))
            continue
        flush()
        answered = required(block.tool_use_id, f"{at}.tool_use_id")
        said = text_of(block.content, f"{at}.content")
        # No template has a place for it.
        text = f"Error: {said}" if block.is_error else said
        result.append({"role": "tool", "tool_call_id": answered, "name": "", "content": text})
    flush()
    return result or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    made: Message = {"role": "assistant", "content": ""}
    calls = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type == "thinking":
            thoughts.append(required(block.thinking, f"{at}.thinking"))
        elif block.type == "redacted_thinking":
            continue  # nobody but its maker can read it
        elif block.type == "tool_use":
            function = {"name": required(block.name, f"{at}.name"), "arguments": block.input or {}}
            calls.append({"id": required(block.id, f"{at}.id"), "type": "function", "function": function})
        else:
            texts.append(block_text(block, at))
    made["content"] = joined_texts(texts)
    if any(thoughts):
        made["thinking"] = joined_texts(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made
