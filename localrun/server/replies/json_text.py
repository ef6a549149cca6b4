"""Reading one JSON value from text that is still arriving.

Pure. Does not: know what the value is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from localrun.server.replies.source import CutShortError, MalformedError, Read, Source

# Deeper nesting is nobody's arguments; Python's own parser gives up at about its recursion limit.
MAX_DEPTH = 200

_IN_TEXT = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[\s,:0-9eE+\-.truefalsn]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonScan:
    """Finds the end of an object or array. `depth` 1 and up begins inside of so many objects."""

    def __init__(self, depth: int = 0) -> None:
        self._open = ["}"] * depth
        self._in_text = False
        self.error_at = 0

    def advance(self, text: str, at: int) -> tuple[int, bool]:
        """Where the scan got to from `at`, and whether the value ended there. Raises MalformedError at
        `error_at`.

        Stops before a backslash whose next character has not come yet.
        """
        while at < len(text):
            if self._in_text:
                found = _IN_TEXT.match(text, at)
                assert found is not None
                at = found.end()
                if at >= len(text):
                    break
                if text[at] == "\\":
                    if at + 1 >= len(text):
                        break
                    at += 2
                else:
                    self._in_text = False
                    at += 1
                continue
            if self._open:
                found = _BETWEEN.match(text, at)
                assert found is not None
                at = found.end()
                if at >= len(text):
                    break
            self.error_at = at
            at += 1
            if self._structure(text[at - 1]):
                return at, True
        return at, False

    def _structure(self, character: str) -> bool:
        """Takes a bracket or a quote; whether the value ends with it."""
        if character == '"' and self._open:
            self._in_text = True
        elif character in _CLOSING and len(self._open) < MAX_DEPTH:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
            return not self._open
        else:
            raise MalformedError
        return False


def read_value(source: Source) -> Read[str]:
    """The text of the object or array that comes next, taken. Raises MalformedError, at the end too."""
    scan, start = JsonScan(), source.at
    while True:
        source.at, is_over = scan.advance(source.text, source.at)
        if is_over:
            return source.text[start : source.at]
        if not (yield from source.wait()):
            raise CutShortError


def stream_value(source: Source, scan: JsonScan, emit: Callable[[str], None]) -> Read[None]:
    """As `read_value`, handing the text on and committing it as it comes."""
    while True:
        start = source.at
        try:
            source.at, is_over = scan.advance(source.text, start)
        except MalformedError:
            emit(source.text[start : scan.error_at])
            source.at = scan.error_at
            source.commit()
            raise
        emit(source.text[start : source.at])
        source.commit()
        if is_over:
            return
        if not (yield from source.wait()):
            raise CutShortError


def parse(text: str) -> Any:
    """The value, also with line breaks inside texts, which models write. Raises MalformedError."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise MalformedError from None


def dump(value: Any) -> str:
    """JSON as clients get it: nothing escaped that need not be, but half a surrogate pair, which no UTF-8 can carry."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
