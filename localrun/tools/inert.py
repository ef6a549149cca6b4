"""Texts of servers, which may hold anything: made harmless and short. Pure.

What is left is what a person is shown and what a model gets, so that neither reads something that the other does not.
"""

from __future__ import annotations

import re

# Escape sequences of terminals, whole: CSI, the strings of OSC, DCS and the like, and those of two characters.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
# Other controls but tab and line feed; what reorders or hides text (bidirectional marks, zero widths but those of
# scripts and emoji, variation selectors beyond the usual, tags); halves of pairs.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)
_LINE_ENDS = re.compile(r"\r\n?")


def inert(text: str) -> str:
    """Without what steers a terminal or hides from a reader."""
    return _HIDDEN.sub("", _LINE_ENDS.sub("\n", _ESCAPES.sub("", text)))


def shortened(text: str, most: int) -> str:
    """Not longer than `most` characters, with an ellipsis where it was cut."""
    return text if len(text) <= most else text[: most - 1] + "…"
