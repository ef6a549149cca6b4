"""Text from elsewhere, made harmless: nothing that came from outside reaches a terminal but through `visible`, and
nothing from a server of tools a person or a model but through `inert`.

A terminal obeys control characters: they could move the cursor, rename the window or write to the clipboard. Characters
that reorder the text around them make a command read as another one. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

# C0 controls but tab and line feed as their pictures (ESC becomes U+241B); as a mark C1 controls, which have none, what
# reorders text, and halves of surrogate pairs, which cannot be sent.
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}
_MARKED = (*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN |= dict.fromkeys((*_MARKED, *range(0xD800, 0xE000)), "\N{REPLACEMENT CHARACTER}")
_ONE_LINE = _SHOWN | {0x09: "\u2409", 0x0A: "\u240a"}
# What doubled line ends show: three blank lines, or a blank one below a line that goes on, as those of programs do.
_DOUBLED = re.compile(r"\n{4}|[;{(\[]\n\n|\n\n[ \t)\]}]")
_ESCAPED = {code: f"\\u{code:04x}" for code in _SHOWN}


def visible(text: str) -> str:
    """As long as before; line feeds and tabs stay."""
    return text.translate(_SHOWN)


def visible_line(text: str) -> str:
    """As `visible`, of a text that must stay on one line."""
    return text.translate(_ONE_LINE)


def visible_json(text: str) -> str:
    """JSON text with the same value."""
    return text.translate(_ESCAPED)


def with_lines_once(pasted: str) -> str:
    """A paste of lines that end in CR LF, each of which xterm, tmux and readline make two line ends of, as they were.
    Paragraphs stay, and so do a few lines that could be either."""
    is_doubled = _DOUBLED.search(pasted) and all(len(run) % 2 == 0 for run in re.findall("\n+", pasted))
    return pasted.replace("\n\n", "\n") if is_doubled else pasted


# --- texts of servers of tools ---
# What is left is what a person is shown and what a model gets, so that neither reads something that the other does not.

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
