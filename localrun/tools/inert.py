"""Texts of servers, which may hold anything: made harmless and short. Pure.

What is left is what a person is shown and what a model gets, so that neither reads something that the other does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

# Escape sequences of terminals, whole: CSI, the strings of OSC, DCS and the like, and those of two characters.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
# Other controls but tab and line feed; what reorders or hides text (bidirectional marks, zero widths but those of
# scripts and emoji, variation selectors beyond the usual, tags); halves of pairs.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
# Before the lines of tracebacks of exception groups.
_MARGIN = re.compile(r"^\s*[|+] ?")
_NOTHING_SAID = re.compile(r'[^A-Za-z]*$|\s{4}|\s*File "|.*Traceback \(most recent call last\)|Node\.js v[\d.]+$')
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|ExceptionGroup)\b")
_MAX_EXCEPTION_LINES = 4
_LINE_ENDS = re.compile(r"\r\n?")


def inert(text: str) -> str:
    """Without what steers a terminal or hides from a reader."""
    return _HIDDEN.sub("", _LINE_ENDS.sub("\n", _ESCAPES.sub("", text)))


def as_json(value: object) -> str:
    """JSON to read, with all of the value: what steers or hides is written as escapes."""
    return _HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1], json.dumps(value, indent=2, ensure_ascii=False))


def last_words(lines: Iterable[str]) -> str:
    """Why a program ended, of the lines that it printed at last: its last exception, without the traceback, and what
    came at the very end."""
    said = [line for line in (_MARGIN.sub("", line) for line in lines) if not _NOTHING_SAID.match(line)]
    began = next((number for number in reversed(range(len(said))) if _EXCEPTION.match(said[number])), len(said) - 2)
    told = said[max(0, began) :]
    return " / ".join(line.strip() for line in (*told[:_MAX_EXCEPTION_LINES], *told[_MAX_EXCEPTION_LINES:][-1:]))


def shortened(text: str, most: int) -> str:
    """Not longer than `most` characters, with an ellipsis where it was cut."""
    return text if len(text) <= most else text[: most - 1] + "…"
