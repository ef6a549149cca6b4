"""One reply as a model writes it and what it means, and what the tables of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localrun.server.replies.formats import CallFormat
from localrun.server.replies.thinking_tags import ThinkingTags

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
        "required": ["city"],
    },
    "get_time": {"type": "object", "properties": {}},
    "save": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "tags": {"type": "array"}, "to": {"type": ["string", "null"]}},
    },
}

THINK = ThinkingTags("<think>", "</think>")
BRACKETS = ThinkingTags("[THINK]", "[/THINK]")
COHERE = ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>")
GEMMA_CHANNEL = ThinkingTags("<|channel>thought", "<channel|>")

Call = tuple[str, dict[str, Any]]
PARIS: Call = ("get_weather", {"city": "Paris"})
TIME: Call = ("get_time", {})


@dataclass(frozen=True)
class Golden:
    """`expects` has ("content", text), ("thinking", text) and ("call", (name, arguments))."""

    name: str
    format: CallFormat | None
    text: str
    expects: tuple[tuple[str, Any], ...]
    tags: ThinkingTags | None = None
    thinking_open: str | None = None
    opened: str = ""
    control_tokens: tuple[str, ...] = ()


def content(text: str) -> tuple[str, Any]:
    return "content", text


def thinking(text: str) -> tuple[str, Any]:
    return "thinking", text


def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any]:
    return "call", (name, arguments)
