"""From sampled tokens to text that may be shown: whole UTF-8 characters, no stop string, nothing taken back. Pure.

A token may be a part of a character, and a stop string may begin in one token and end three tokens later. So text is
held back for as long as it could still turn into a stop string, and bytes until their character is complete.
"""

from __future__ import annotations

import codecs


class TextStream:
    """The text of one request. After `stopped` is set, everything is dropped."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        # Invalid bytes become U+FFFD: a model may emit any byte sequence, JSON may not.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped: str | None = None

    def feed(self, piece: bytes) -> str:
        """The text that this token makes certain. Sets `stopped` to the stop string it completes, if any."""
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        rest = self._advance(self._decoder.decode(b"", final=True))
        rest += "" if self.stopped else self._held
        self._held = ""
        return rest

    def _advance(self, text: str) -> str:
        if not self._stop or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        keep = max(_open_suffix(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _open_suffix(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
