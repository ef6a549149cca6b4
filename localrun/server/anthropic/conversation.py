"""Anthropic's conversations as chat templates want them.

A user's message may hold results of tools beside its text: each becomes a message of its own, in its place. System
messages in the middle stay where they are, so that the prompt before them, and what is cached of it, stays the same.

Pure. Does not: render a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from localrun.errors import BadRequest
from localrun.server import notices
from localrun.server.prompting.ask import Attachments, Message, arguments_of, assistant, called, joined
from localrun.wire import MediaKind


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of any type; each type has some of the fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    title: str | None = None
    context: str | None = None
    source: Any = None


Content = str | list[Block]


def text_of(content: Content | None, where: str, media: Attachments | None = None) -> str:
    """The text of blocks that are text or hold it. Pictures go into `media`, where there is one. Raises BadRequest
    naming any other."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined([block_text(block, f"{where}[{index}]", media) for index, block in enumerate(content)], "\n\n")


def block_text(block: Block, where: str, media: Attachments | None = None) -> str:
    """Of one block. Raises BadRequest for one that no model can read."""
    if block.type == "text":
        return str(required(block.text, f"{where}.text"))
    if block.type == "document":
        return _lines(block.title, block.context, _document(block.source, where))
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        return _lines(block.title, source, text_of(block.content, f"{where}.content"))
    if block.type == "tool_reference":  # of a search for tools, whose find is among the tools
        return f"Loaded: {block.tool_name or block.name or 'a tool'}"
    if block.type == "image":
        if media is None:
            raise BadRequest(f"{where}: no image can stand here; put it into a message or a tool_result", field=where)
        return _picture(block.source, f"{where}.source", media)
    raise BadRequest(
        f"{where}.type: {block.type[:40]!r} blocks are not supported here; send text, or leave the block out",
        field=f"{where}.type",
    )


def _picture(source: Any, where: str, media: Attachments) -> str:
    """Its `media_type` does not count: the bytes say what it is."""
    kind = source.get("type") if isinstance(source, dict) else None
    name = {"base64": "data", "url": "url"}.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise BadRequest(f"{where}.type: use base64, with data, or url", field=f"{where}.type")
    if not isinstance(source.get(name), str):
        raise BadRequest(f"{where}.{name}: a text is required", field=f"{where}.{name}")
    return media.add(source[name], f"{where}.{name}", MediaKind.IMAGE)


def _document(source: Any, where: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if kind == "content":
        try:
            return text_of(msgspec.convert(source.get("content"), Content), f"{where}.source.content")
        except msgspec.ValidationError as error:
            raise BadRequest(f"{where}.source.content: {error}", field=f"{where}.source.content") from None
    raise BadRequest(
        f"{where}.source: only documents of text can be read here; send the document's text", field=f"{where}.source"
    )


def _lines(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def required(value: Any, field: str) -> Any:
    """Raises BadRequest where a block lacks what its type needs."""
    if value is None:
        raise BadRequest(f"{field} is required", field=field)
    return value


def joined_texts(texts: Sequence[str]) -> str:
    """Texts of neighbouring blocks as one."""
    return joined([text for text in texts if text], "\n\n")


# Claude Code puts a line for its maker's accounts before the system prompt. It is another one in every request, is not
# meant for the model, and would make every cached prefix useless.
_ACCOUNTING = "x-anthropic-billing-header:"


class AskedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`."""

    role: str
    content: Content


def conversation_of(system: Content | None, messages: Sequence[AskedMessage], media: Attachments) -> list[Message]:
    """Pictures go into `media`. Raises BadRequest naming the message or the block."""
    if not messages:
        raise BadRequest("messages: at least one message is required", field="messages")
    result: list[Message] = []
    told = system_text(system, "system")
    if told:
        result.append({"role": "system", "content": told})
    begins = max((at for at, message in enumerate(messages) if _has_summary(message.content)), default=0)
    for index, message in enumerate(messages[begins:], begins):
        result += _made(message, f"messages[{index}]", media)
    return result


def _has_summary(content: Content) -> bool:
    """Whether a service made a summary of all that comes before."""
    return not isinstance(content, str) and any(block.type == "compaction" and block.content for block in content)


def system_text(system: Content | None, where: str) -> str:
    """The system prompt, without what Claude Code puts before it."""
    if isinstance(system, list):
        return text_of([block for block in system if not (block.text or "").startswith(_ACCOUNTING)], where)
    if system is not None and system.startswith(_ACCOUNTING):
        return system.partition("\n")[2]
    return system or ""


def _made(message: AskedMessage, where: str, media: Attachments) -> list[Message]:
    if message.role == "system":
        return [{"role": "system", "content": system_text(message.content, f"{where}.content")}]
    if message.role not in ("user", "assistant"):
        raise BadRequest(
            f"{where}.role: {message.role[:40]!r} is not a role; use user, assistant or system", field=f"{where}.role"
        )
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return _assistant(message.content, f"{where}.content", media)
    return _user(message.content, f"{where}.content", media)


def _user(blocks: Sequence[Block], where: str, media: Attachments) -> list[Message]:
    result: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            result.append({"role": "user", "content": joined_texts(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type != "tool_result":
            texts.append(block_text(block, at, media))
            continue
        flush()
        answered = required(block.tool_use_id, f"{at}.tool_use_id")
        said = text_of(block.content, f"{at}.content", media)
        # No template has a place for it.
        text = f"Error: {said}" if block.is_error else said
        result.append({"role": "tool", "tool_call_id": answered, "name": "", "content": text})
    flush()
    return result or [{"role": "user", "content": ""}]


# Tools that a service ran for a conversation that was begun there, and their results. What it found is in its answer.
_OF_SERVICE = ("server_tool_use", "mcp_tool_use", "_tool_result")


def _assistant(blocks: Sequence[Block], where: str, media: Attachments) -> list[Message]:
    summary: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type == "thinking":
            thoughts.append(required(block.thinking, f"{at}.thinking"))
        elif block.type == "compaction" and block.content:
            summary = [{"role": "user", "content": text_of(block.content, f"{at}.content")}]
            texts, thoughts, calls = [], [], []
        elif block.type in ("redacted_thinking", "compaction"):
            continue  # nobody but its maker can read it
        elif block.type == "tool_use":
            name = required(block.name, f"{at}.name")
            calls.append(called(name, arguments_of(block.input), required(block.id, f"{at}.id")))
        elif block.type.endswith(_OF_SERVICE):
            notices.note(f"{at} ({block.type[:40]})")
        else:
            texts.append(block_text(block, at, media))
    said = assistant(joined_texts(texts), thinking=joined_texts(thoughts), calls=calls)
    return [*summary, said] if texts or thoughts or calls else summary or [said]
