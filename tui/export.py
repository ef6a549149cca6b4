"""A chat as a document: Markdown to read, JSON to work with. Pure.

Does not: write files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from localrun.tui.history import Message

_NAMES = {"user": "You", "assistant": "Model", "tool": "Tool"}


def to_markdown(title: str, model: str, system: str, messages: Sequence[Message]) -> str:
    """Every message below a heading of its own, thinking as a quote before its answer."""
    parts = [f"# {title or 'A chat'}", f"Model: {model}"]
    if system:
        parts.append(f"System prompt:\n\n{_quoted(system)}")
    for message in messages:
        parts.append(f"## {_NAMES.get(message.role, message.role)}, {_when(message.created_at_s)}")
        if message.extra.get("thinking"):
            parts.append(_quoted(str(message.extra["thinking"])))
        parts.append(message.content)
    return "\n\n".join(parts) + "\n"


def to_json(title: str, model: str, system: str, parameters: dict[str, Any], messages: Sequence[Message]) -> str:
    """The messages as `/api/chat` takes them, with what is known of each besides."""
    document = {
        "title": title,
        "model": model,
        "system": system,
        "options": parameters,
        "messages": [
            {
                "role": message.role,
                "content": message.content,
                **message.extra,
                "created_at": datetime.fromtimestamp(message.created_at_s, UTC).isoformat(),
            }
            for message in messages
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def code_blocks(markdown: str) -> list[str]:
    """What stands in fenced blocks, in order; a fence that is never closed runs to the end."""
    found: list[str] = []
    inside: list[str] | None = None
    fence = ""
    for text in markdown.splitlines():
        stripped = text.strip()
        if inside is None:
            if stripped.startswith(("```", "~~~")):
                fence = stripped[0] * (len(stripped) - len(stripped.lstrip(stripped[0])))
                inside = []
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            found.append("\n".join(inside))
            inside = None
        else:
            inside.append(text)
    if inside:
        found.append("\n".join(inside))
    return found


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
