"""Every key of the interface that may be changed, in one table: what it is called, what it does, what it is by default.

Screens and dialogs make their bindings from it, the help and the hints of dialogs print it, and the person's own keys
(`preferences.py`) replace what is here. And what the terminal sends, where textual reads it otherwise than a person
means it (`TerminalInput`).

Does not: hold keys that belong to the terminal's own customs inside a list or a box (arrows, Enter, Escape, Tab).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.binding import Binding
from textual.keys import Keys
from textual.message import Message

from localrun.visible import with_lines_once


class Key(NamedTuple):
    """`keys` as textual names them, several with commas between. `label` is for the footer, `what` for the help."""

    keys: str
    label: str
    what: str


KEYS: dict[str, Key] = {
    # Terminals and desktops keep some function keys to themselves (GNOME's F1, F10 and F11), so each has a letter, too;
    # tmux and screen keep ^b and ^a. What line editors do with letters the prompt does, too, but for ^d, ^e and ^y.
    "app.chat": Key("ctrl+t,f1", "Chat", "chat"),
    "app.monitor": Key("ctrl+s,f2", "Monitor", "monitor"),
    "app.models": Key("f3,ctrl+o", "Models", "models: choose one"),
    "app.logs": Key("f4,ctrl+f", "Logs", "the daemon's log"),
    "app.help": Key("ctrl+g,f10", "Help", "this help"),
    "app.reconnect": Key("ctrl+r", "Reconnect", "start the daemon if it has ended, and reconnect"),
    "app.quit": Key("ctrl+q", "Quit", "quit; the daemon and its models stay"),
    "chat.stop": Key("escape", "Stop", "stop the answer or the edit; from a message, go back"),
    "chat.new": Key("ctrl+n", "New", "new chat; a running answer goes on"),
    "chat.list": Key("ctrl+l", "Chats", "earlier chats: open, search, rename, delete"),
    "chat.beside": Key("f5,ctrl+d", "Beside", "a second chat beside this one, or back to one"),
    "chat.other": Key("f6,ctrl+p", "Other chat", "go to the other of two chats"),
    "chat.editor": Key("ctrl+e", "Editor", "write the prompt in $EDITOR"),
    "chat.copy": Key("ctrl+y", "Copy", "copy the marked answer, or the last one"),
    # No letters: whoever types while a message has the focus means the prompt.
    "message.edit": Key("enter", "Edit", "on a question: change it and ask again"),
    "message.retry": Key("ctrl+r", "Ask again", "on a question: ask it again"),
    "message.previous": Key("left_square_bracket", "Earlier version", "on a question: its earlier version"),
    "message.next": Key("right_square_bracket", "Later version", "on a question: its later version"),
    "message.code": Key("ctrl+x", "Copy code", "on an answer: copy its code"),
    "message.thinking": Key("enter", "Thinking", "on an answer: show what the model thought"),
    "chats.rename": Key("ctrl+r", "Rename", "rename the marked chat"),
    "chats.delete": Key("ctrl+d", "Delete", "delete it; asks first"),
    "chats.restore": Key("ctrl+z", "Undo", "bring back the chat that was deleted last"),
    "models.detail": Key("ctrl+g", "Details", "all about the marked model"),
    "models.load": Key("ctrl+u", "Load / unload", "load or unload it"),
    "models.cancel": Key("ctrl+x", "Cancel the pull", "cancel the newest pull"),
    "models.delete": Key("ctrl+d", "Delete", "delete it from this machine; asks first"),
    "tools.forget": Key("ctrl+d", "Forget", "ask again for what was allowed or forbidden"),
    "monitor.cancel": Key("x", "Cancel", "cancel the selected request, whoever sent it"),
    "monitor.sort": Key("s", "Sort", "sort by arrival, speed, output, prompt, client"),
    "monitor.filter": Key("slash", "Filter", "filter by parts of state, client, route, model, lane"),
    "monitor.view": Key("v", "Map", "KV map or graph, where there is no room for both"),
    "monitor.pause": Key("p", "Pause", "pause the display"),
    "monitor.record": Key("r", "Record", "record to a file, or end the recording"),
    "monitor.usage": Key("u", "Use", "what API keys used, by key, day and model"),
    "usage.by": Key("b", "By", "by key, day or model"),
    "usage.days": Key("d", "Days", "of the last 30, 365, 1 or 7 days"),
    "logs.level": Key("l", "Level", "lowest level shown: debug, info, warning, error"),
    "logs.search": Key("slash", "Search", "only lines with these words"),
    "logs.end": Key("end", "Newest", "the newest line, and follow"),
}

_NAMES = {
    "slash": "/",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "question_mark": "?",
    "escape": "Esc",
    "enter": "Enter",
    "end": "End",
    "pageup": "PgUp",
    "pagedown": "PgDn",
}


def bind(name: str, action: str, **options: Any) -> Binding:
    key = KEYS[name]
    return Binding(key.keys, action, key.label, id=name, **options)


def shown(keys: str) -> str:
    """Keys as a person reads them: `f3,ctrl+o` is `F3 ^o`."""
    return " ".join(_one(key.strip()) for key in keys.split(","))


def key_of(name: str, keymap: Mapping[str, str]) -> str:
    """A key of the table as a person reads it, with the person's own keys."""
    return shown(keymap.get(name, KEYS[name].keys))


def of_section(section: str, keymap: Mapping[str, str]) -> list[tuple[str, str]]:
    """Key and meaning of all of a section (`app`, `chat`, ...), as they are with the person's own keys."""
    return [(key_of(name, keymap), key.what) for name, key in KEYS.items() if name.startswith(f"{section}.")]


def _one(key: str) -> str:
    if key.startswith("ctrl+"):
        return f"^{key.removeprefix('ctrl+')}"
    if key in _NAMES:
        return _NAMES[key]
    return key.upper() if len(key) > 1 and key[0] == "f" and key[1:].isdigit() else key


# --- what the terminal sends ---

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
    """`alt_keys` are those with Alt that are bound; `has_text` says whether the focus is in some.

    Escape and a key at once are two keys: over ssh and in tmux they often arrive together, which textual takes for Alt
    and the key, so that neither does anything. Alt with a key that is bound stays what it is, and so do Alt+Backspace
    and, where there is text to move in, Alt+B and Alt+F, by which terminals of macOS delete and move by words, and
    Alt+Enter, which begins a line in other programs and must not send one that is half written. An
    escape character in a paste is left out: textual would end the paste there, and take what follows for keys. A line
    feed that tmux wrote as a key with Ctrl is one again, and so is a line end that a terminal doubled. A paste whose
    end was lost on the way ends after a while, as everything typed would belong to it.
    """

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
        if sequence == "\x1b\r" and self.has_text():
            return [events.Key("alt+enter", None)]
        is_both = len(sequence) == 2 and sequence[0] == _ESCAPE and sequence[1] not in _WITH_ESCAPE
        is_both &= sequence[-1] not in _MOVES or not self.has_text()
        found = list(super()._sequence_to_key_events(sequence, alt))
        if (is_both and found) or (alt and sequence not in _BEGINNINGS and found[0].key not in self.alt_keys):
            found = [events.Key("escape", _ESCAPE), *super()._sequence_to_key_events(sequence[-1])]
        return found
