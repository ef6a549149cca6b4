"""Text from elsewhere, made harmless: nothing that came from outside reaches a terminal but through `visible`.

A terminal obeys control characters: they could move the cursor, rename the window or write to the clipboard. Characters
that reorder the text around them make a command read as another one. Pure.
"""

from __future__ import annotations

import re

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
