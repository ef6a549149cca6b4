"""The vocabulary of the fakes, and which token follows a prefix.

256 bytes, then `<|im_start|>`, `<|im_end|>` (ends a generation). Generated tokens are lower-case letters, spaces and
the two bytes of "é", so that text, partial characters and ends all occur.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

_SAY = re.compile(rb"SAY\[\[(.*?)\]\]", re.DOTALL)


def scripted_token(tokens: Sequence[int], *, start: int, end: int) -> int | None:
    """For tests of clients that need a certain reply, such as a call: `SAY[[text]]` in the prompt makes the next reply
    that text; the last one before the reply counts. A tool's result that holds another one ends a loop of calls.

    The token after `tokens`: the next byte of the script, then `end`; None for a prompt without a script.

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
    return bytes(token for token in tokens if 0 <= token < 256)


IM_START, IM_END = 256, 257
CONTROL = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
CONTROL_NAMES = {token: name for name, token in CONTROL.items()}
_CONTROL_TEXT = re.compile("|".join(map(re.escape, CONTROL)))
_LETTERS = b"abcdefghijklmnopqrstuvwxyz      "
_LEAD, _TAIL = "é".encode()
_END_ONE_IN = 97


def next_token(digest: int, *, ignore_eos: bool = False) -> int:
    """The token that follows a prefix with this digest."""
    bits = mixed(digest)
    if not ignore_eos and bits >> 40 & 0xFFFF and (bits >> 40) % _END_ONE_IN == 0:
        return IM_END
    pick = (bits >> 20) % (len(_LETTERS) + 2)
    return _LETTERS[pick] if pick < len(_LETTERS) else (_LEAD, _TAIL)[pick - len(_LETTERS)]


def mixed(digest: int) -> int:
    """64 bits, each of which depends on many of the digest's."""
    return (digest * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & (2**64 - 1)


def digest_after(before: int, token: int, shift: int = 0, adapter_hash: bytes = b"") -> int:
    """The digest of a prefix with one more token, whose position is `shift` behind its number, computed with these
    adapters."""
    digest = crc32((token & 0xFFFFFFFF).to_bytes(4, "little") + adapter_hash, before)
    return crc32(shift.to_bytes(4, "little"), digest) if shift else digest


def tokenize(text: str, *, parse_special: bool) -> list[int]:
    """See `Backend.tokenize`."""
    tokens: list[int] = []
    at = 0
    for found in _CONTROL_TEXT.finditer(text) if parse_special else ():
        tokens += text[at : found.start()].encode("utf-8", "replace")
        tokens.append(CONTROL[found.group()])
        at = found.end()
    return tokens + list(text[at:].encode("utf-8", "replace"))
