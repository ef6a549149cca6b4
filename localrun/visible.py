"""Text from elsewhere, made harmless for a terminal: nothing that came from outside reaches one but through `visible`.

A terminal obeys control characters: text with them could move the cursor, rename the window or write to the clipboard.
Characters that reorder what is displayed around them make a command read as another one. Pure.
"""

from __future__ import annotations

_KEPT = "\n\t"
_MARK = "\N{REPLACEMENT CHARACTER}"
# C0 controls as their pictures (ESC becomes U+241B); as a mark C1 controls, which have none, what reorders text, and
# halves of surrogate pairs, which no terminal can be sent.
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT} | {0x7F: "\u2421"}
_SHOWN |= dict.fromkeys(
    (*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), _MARK
)
_SHOWN |= dict.fromkeys(range(0xD800, 0xE000), _MARK)
_ONE_LINE = _SHOWN | {0x09: "\u2409", 0x0A: "\u240a"}
_ESCAPED = {code: f"\\u{code:04x}" for code in _SHOWN}


def visible(text: str) -> str:
    """The text with every control character but line feed and tab replaced by one to see; as long as before."""
    return text.translate(_SHOWN)


def visible_line(text: str) -> str:
    """As `visible`, of a text that must stay on one line."""
    return text.translate(_ONE_LINE)


def visible_json(text: str) -> str:
    """JSON text with the same value."""
    return text.translate(_ESCAPED)
