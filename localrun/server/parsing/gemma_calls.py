"""Gemma's calls: `call:get_weather{city:<|"|>Paris<|"|>,days:3}` between two marks.

Like JSON, with keys unquoted and a token of its own for quotes, within which nothing is escaped. No grammar holds the
model to it unless a call must come, so what it slips on is mended where its meaning is plain: a text in other quotes or
in none, and quotes, braces or marks that are not closed at the end.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from localrun.server.parsing.json_calls import checked_name, parse_json
from localrun.server.parsing.source import CallReader, CutShortError, MalformedError, MarkSet, Read, Reading
from localrun.server.parsing.xml_calls import allowed_types

MAX_DEPTH = 100
_HEAD = re.compile(r"\s*call:([^{]*)(?=\{)")
_BARE = re.compile(r"[^,{}\[\]]+")
_SPACE = re.compile(r"\s*")
# What a text without quotes ends before: the next key, or the end of the call.
_BARE_TEXT_END = re.compile(r",\s*[\w.-]+\s*:|\}?\Z")
_SINGLE_QUOTE_END = re.compile(r"'(?=\s*(?:[,}\]]|\Z))")


def reader(opening: str, closing: str, quote: str) -> CallReader:
    ends = MarkSet((closing, opening))

    def read(reply: Reading) -> Read[None]:
        source = reply.source
        start = source.at
        try:
            text, mark = yield from source.until(ends)
        except CutShortError:
            if reply.is_cut:
                raise
            text, mark = source.text[start:], ""
            source.at = len(source.text)
        if mark == opening:
            source.at -= len(mark)
        head = _HEAD.match(text)
        if head is None:
            raise MalformedError
        name = checked_name(head.group(1))
        parameters = reply.schemas.get(name, {})
        reply.call(name, _arguments(text.rstrip(), head.end(), quote, parameters, is_closed=bool(mark)))

    return read


def _arguments(text: str, at: int, quote: str, parameters: Mapping[str, Any], *, is_closed: bool) -> dict[str, Any]:
    """The arguments that begin at `at` and go on to the end; slips are mended where that `is_closed`. Raises
    MalformedError."""
    scans = (_Scan(text, quote), *((_Mending(text, quote, parameters),) if is_closed else ()))
    for scan in scans:
        try:
            value, end = scan.value(at, 0)
        except MalformedError:
            continue
        if isinstance(value, dict) and end == len(text):
            return value
    raise MalformedError


class _Scan:
    """The values of a text, by the rules. Each method takes where a value begins, gives it with where it ends, and
    raises MalformedError."""

    def __init__(self, text: str, quote: str) -> None:
        self.text = text
        self._quote = quote
        self._key = re.compile(rf"\s*(\"|{re.escape(quote)})?([^:{{}}\[\],\"]+?)(?(1)\1)\s*:")

    def value(self, at: int, depth: int, key: str = "") -> tuple[Any, int]:
        at = self.after_space(at)
        if depth > MAX_DEPTH:
            raise MalformedError
        if self.text.startswith(self._quote, at):
            end = self.text.find(self._quote, at + len(self._quote))
            return (
                self.unclosed(at, depth)
                if end < 0
                else (self.text[at + len(self._quote) : end], end + len(self._quote))
            )
        character = self.text[at : at + 1]
        if character == "{":
            return self._object(at + 1, depth)
        if character == "[":
            return self._list(at + 1, depth)
        if character == '"':
            return self._quoted(at)
        return self.bare(at, depth, key)

    def bare(self, at: int, depth: int, key: str) -> tuple[Any, int]:
        found = _BARE.match(self.text, at)
        if found is None:
            raise MalformedError
        return parse_json(found.group()), found.end()

    def unclosed(self, at: int, depth: int) -> tuple[Any, int]:
        raise MalformedError

    def is_at_end(self, at: int, closing: str) -> bool:
        return self.text.startswith(closing, at)

    def after_space(self, at: int) -> int:
        found = _SPACE.match(self.text, at)
        assert found is not None
        return found.end()

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self.after_space(at)
        while not self.is_at_end(at, "}"):
            key = self._key.match(self.text, at)
            if key is None:
                raise MalformedError
            found[key.group(2)], at = self.value(key.end(), depth + 1, key.group(2))
            at = self._after_separator(at, "}")
        return found, min(at + 1, len(self.text))

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found = []
        at = self.after_space(at)
        while not self.is_at_end(at, "]"):
            value, at = self.value(at, depth + 1)
            found.append(value)
            at = self._after_separator(at, "]")
        return found, min(at + 1, len(self.text))

    def _quoted(self, at: int) -> tuple[str, int]:
        end = at + 1
        while (end := self.text.find('"', end)) >= 0:
            if not _is_escaped(self.text, end):
                return str(parse_json(self.text[at : end + 1])), end + 1
            end += 1
        raise MalformedError

    def _after_separator(self, at: int, closing: str) -> int:
        at = self.after_space(at)
        if self.text.startswith(",", at):
            return self.after_space(at + 1)
        if not self.is_at_end(at, closing):
            raise MalformedError
        return at


class _Mending(_Scan):
    """The same of a text with slips."""

    def __init__(self, text: str, quote: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(text, quote)
        self._parameters = parameters

    def bare(self, at: int, depth: int, key: str) -> tuple[Any, int]:
        if self.text.startswith("'", at):
            found = _SINGLE_QUOTE_END.search(self.text, at + 1)
            if found is not None:
                return self.text[at + 1 : found.start()], found.end()
        allowed = allowed_types(key, self._parameters)
        end = _BARE_TEXT_END.search(self.text, at)
        if depth != 1 or end is None or (allowed and "string" not in allowed):
            return super().bare(at, depth, key)
        text = self.text[at : end.start()].rstrip()
        if allowed != {"string"}:
            try:
                return parse_json(text), end.start()
            except MalformedError:
                pass
        return text, end.start()

    def unclosed(self, at: int, depth: int) -> tuple[Any, int]:
        """A text whose quote is not closed goes on to the brackets that close what it stands in."""
        end = len(self.text)
        for _ in range(depth):
            end = len(self.text[:end].rstrip())
            end -= self.text[end - 1 : end] in ("}", "]")
        return self.text[at + len(self._quote) : end], end

    def is_at_end(self, at: int, closing: str) -> bool:
        return at >= len(self.text) or super().is_at_end(at, closing)


def _is_escaped(text: str, at: int) -> bool:
    n_backslashes = 0
    while text[at - 1 - n_backslashes] == "\\":
        n_backslashes += 1
    return n_backslashes % 2 == 1
