"""Gemma 4's calls: `call:get_weather{city:<|"|>Paris<|"|>,days:3}` between `<|tool_call>` and `<tool_call|>`.

Like JSON, with keys unquoted and a token of its own for quotes, within which nothing is escaped.

Pure.
"""

from __future__ import annotations

import re
from typing import Any

from localrun.server.parsing.json_calls import parse_json
from localrun.server.parsing.named_calls import checked_name
from localrun.server.parsing.parser import Reading
from localrun.server.parsing.source import MalformedError, MarkSet, Read

QUOTE = '<|"|>'
MAX_DEPTH = 100
_CALL_END = MarkSet(("<tool_call|>",))
_HEAD = re.compile(r"\s*call:([^{]*)(?=\{)")
_KEY = re.compile(rf"\s*(\"|{re.escape(QUOTE)})?([^:{{}}\[\],\"]+?)(?(1)\1)\s*:")
_BARE = re.compile(r"[^,{}\[\]]+")
_SPACE = re.compile(r"\s*")


def read_gemma(reply: Reading) -> Read[None]:
    """One call and its closing mark."""
    text, _ = yield from reply.source.until(_CALL_END)
    head = _HEAD.match(text)
    if head is None:
        raise MalformedError
    value, end = _value(text, head.end(), 0)
    if not isinstance(value, dict) or text[end:].strip():
        raise MalformedError
    reply.call(checked_name(head.group(1)), value)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at `at` and where it ends. Raises MalformedError."""
    at = _after_space(text, at)
    if depth > MAX_DEPTH:
        raise MalformedError
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise MalformedError
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    character = text[at : at + 1]
    if character == "{":
        return _object(text, at + 1, depth)
    if character == "[":
        return _list(text, at + 1, depth)
    if character == '"':
        return _quoted(text, at)
    bare = _BARE.match(text, at)
    if bare is None:
        raise MalformedError
    return parse_json(bare.group()), bare.end()


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _after_space(text, at)
    while not text.startswith("}", at):
        key = _KEY.match(text, at)
        if key is None:
            raise MalformedError
        found[key.group(2)], at = _value(text, key.end(), depth + 1)
        at = _after_separator(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = []
    at = _after_space(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _after_separator(text, at, "]")
    return found, at + 1


def _quoted(text: str, at: int) -> tuple[str, int]:
    end = at + 1
    while (end := text.find('"', end)) >= 0:
        if text[at + 1 : end].count("\\") == 0 or not _is_escaped(text, end):
            return str(parse_json(text[at : end + 1])), end + 1
        end += 1
    raise MalformedError


def _is_escaped(text: str, at: int) -> bool:
    n_backslashes = 0
    while text[at - 1 - n_backslashes] == "\\":
        n_backslashes += 1
    return n_backslashes % 2 == 1


def _after_separator(text: str, at: int, closing: str) -> int:
    at = _after_space(text, at)
    if text.startswith(",", at):
        return _after_space(text, at + 1)
    if not text.startswith(closing, at):
        raise MalformedError
    return at


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
