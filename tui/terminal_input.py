"""What the terminal sends, where textual reads it otherwise than a person means it.

Escape and a key at once are two keys: over ssh and in tmux they often arrive together, which textual takes for Alt and
the key, so that neither does anything. Alt with a key that is bound stays what it is, and so do Alt+Backspace and,
where there is text to move in, Alt+B and Alt+F, by which terminals of macOS delete and move by words. An escape
character in a paste is left out: textual would end the paste there, and take what follows for keys. A line feed that
tmux wrote as a key with Ctrl is one again, and so is a line end that a terminal doubled. A paste whose end was lost on
the way ends after a while, as everything typed would belong to it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import ClassVar

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.keys import Keys
from textual.message import Message

from localrun.visible import with_lines_once

_ESCAPE = "\x1b"
# After an escape these delete a word or go back, or move by words; the others begin sequences.
_WITH_ESCAPE = frozenset("\x7f\t\x1b")
_MOVES = frozenset("bf")
_BEGINNINGS = frozenset("[]OP_")
_LINE_FEED = re.compile("\x1b\\[(?:106;5u|27;5;106~)")
# What a terminal says of itself, late perhaps, to a program before this one.
_REPORT = re.compile("\x1b\\[[?>=][0-9;]*[A-Za-z]")
_LONGEST = len("\x1b[27;5;106~")
LOST_AFTER_S = 5.0


class TerminalInput(XTermParser):
    """`alt_keys` are those with Alt that are bound; `has_text` says whether the focus is in some."""

    alt_keys: ClassVar[frozenset[str]] = frozenset()
    has_text: ClassVar[staticmethod[[], bool]] = staticmethod(lambda: True)
    _is_in_paste = False
    _held = ""  # of a paste: what may be the beginning of its end, or of a line feed
    _fed_s = 0.0

    def feed(self, data: str) -> Iterable[Message]:
        self._fed_s = time.monotonic()
        plain = self._without_escapes(data)
        if plain or not data:
            for message in super().feed(plain):
                if isinstance(message, events.Paste) and "\n" not in message.text:
                    message.text = with_lines_once(message.text.replace("\r", "\n"))
                yield message

    def tick(self) -> Iterable[Message]:
        yield from super().tick()
        if self._is_in_paste and time.monotonic() - self._fed_s > LOST_AFTER_S:
            yield from self.feed(BRACKETED_PASTE_END)

    def _without_escapes(self, data: str) -> str:
        data, self._held = self._held + data, ""
        parts: list[str] = []
        while data:
            mark = BRACKETED_PASTE_END if self._is_in_paste else BRACKETED_PASTE_START
            before, found, data = data.partition(mark)
            if self._is_in_paste:
                last = before.rfind(_ESCAPE, -_LONGEST + 1)
                if not found and last >= 0:
                    before, self._held = before[:last], before[last:]
                before = _LINE_FEED.sub("\n", before).replace(_ESCAPE, "")
            parts += (before, found)
            self._is_in_paste ^= bool(found)
        return "".join(parts)

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        if _REPORT.fullmatch(sequence):
            return [events.Key(Keys.Ignore, None)]
        is_both = len(sequence) == 2 and sequence[0] == _ESCAPE and sequence[1] not in _WITH_ESCAPE
        is_both &= sequence[-1] not in _MOVES or not self.has_text()
        found = list(super()._sequence_to_key_events(sequence, alt))
        if (is_both and found) or (alt and sequence not in _BEGINNINGS and found[0].key not in self.alt_keys):
            found = [events.Key("escape", _ESCAPE), *super()._sequence_to_key_events(sequence[-1])]
        return found
