"""What a fake engine writes when its prompt says so: for tests of clients that need a certain reply, such as a call.

`SAY[[text]]` in the prompt makes the next reply that text; the last one before the reply counts. A tool's result that
holds another one ends a loop of calls.

Pure. Does not: know cells or sequences.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SAY = re.compile(rb"SAY\[\[(.*?)\]\]", re.DOTALL)


def scripted_token(tokens: Sequence[int], *, start: int, end: int) -> int | None:
    """The token after `tokens`: the next byte of the script, then `end`; None for a prompt without a script.

    `start` is the control token that begins a message; the reply is what follows the line after its last one.
    """
    if start not in tokens:
        return None
    at = len(tokens) - 1 - list(reversed(tokens)).index(start)
    scripts = _SAY.findall(_bytes(tokens[:at]))
    if not scripts:
        return None
    written = _bytes(tokens[at:]).partition(b"\n")[2]
    script: bytes = scripts[-1]
    if not script.startswith(written) or written == script:
        return end
    return script[len(written)]


def _bytes(tokens: Sequence[int]) -> bytes:
    return bytes(token for token in tokens if token < 256)
