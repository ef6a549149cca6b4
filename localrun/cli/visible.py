"""Text from models and model files, made harmless for a terminal.

A terminal obeys control characters: text with them could move the cursor, rename the window or write to the clipboard.

Pure but for the look at stdout. Does not: touch text that goes to a file or a pipe.
"""

from __future__ import annotations

import sys

_KEPT = "\n\t"
# Control characters as their pictures (ESC becomes U+241B); the upper set, which has none, as replacement characters.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT}
_PICTURES |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def visible(text: str) -> str:
    """The text with every control character but line feed and tab replaced by something to see."""
    return text.translate(_PICTURES)


def for_stdout(text: str) -> str:
    """`visible` when stdout is a terminal, else the text itself."""
    return visible(text) if sys.stdout.isatty() else text
