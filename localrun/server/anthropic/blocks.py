"""Blocks of content, as Anthropic's clients write them, and what is text in them.

Annotations that ask nothing of a model (`cache_control`, `citations`) are ignored: every prefix is cached here.

Pure. Does not: know which blocks a role may have (`conversation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from localrun.errors import BadRequest


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of any type; each type has some of the fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    title: str | None = None
    context: str | None = None
    source: Any = None


Content = str | list[Block]


def text_of(content: Content | None, where: str) -> str:
    """The text of blocks that are text or hold it. Raises BadRequest naming any other."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def block_text(block: Block, where: str) -> str:
    """Of one block. Raises BadRequest for one that no text model can read."""
    if block.type == "text":
        return str(required(block.text, f"{where}.text"))
    if block.type == "document":
        return _joined(block.title, block.context, _document(block.source, where))
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        return _joined(block.title, source, text_of(block.content, f"{where}.content"))
    if block.type == "tool_reference":  # names a tool that is among the tools
        return ""
    if block.type == "image":
        raise BadRequest(f"{where}: this model does not support images; send text", field=where)
    raise BadRequest(
        f"{where}.type: {block.type[:40]!r} blocks are not supported here; send text, or leave the block out",
        field=f"{where}.type",
    )


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


def _joined(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def required(value: Any, field: str) -> Any:
    """Raises BadRequest where a block lacks what its type needs."""
    if value is None:
        raise BadRequest(f"{field} is required", field=field)
    return value


def joined_texts(texts: Sequence[str]) -> str:
    """Texts of neighbouring blocks as one."""
    return "\n\n".join(text for text in texts if text)
