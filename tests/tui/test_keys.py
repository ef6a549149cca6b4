"""What a terminal sends, and the keys and pastes that it becomes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import constants, events
from textual.message import Message

from localrun.tui import keys as module
from localrun.tui.keys import TerminalInput


def _read(*pieces: str, parser: TerminalInput | None = None) -> list[Message]:
    parser = parser or TerminalInput()
    found = [event for piece in pieces for event in parser.feed(piece)]
    time.sleep(constants.ESCAPE_DELAY * 1.2)  # after which a lone escape is one
    return found + list(parser.tick())


def _keys(*pieces: str) -> list[str]:
    return [event.key for event in _read(*pieces) if isinstance(event, events.Key)]


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("\x1bx", ["escape", "x"]),
        ("\x1bX y", ["escape", "X", "space", "y"]),
        ("\x1b\r", ["alt+enter"]),
        ("\x1b1", ["escape", "1"]),
        ("\x1b日", ["escape", "日"]),
        ("\x1b\x0e", ["escape", "ctrl+n"]),
        ("\x1b", ["escape"]),
        ("\x1b\x1b[A", ["escape", "up"]),
        ("\x1bb", ["ctrl+left"]),
        ("\x1b\x7f", ["ctrl+w"]),
        ("\x1b[A", ["up"]),
        ("\x1b[1;3A", ["alt+up"]),
        ("\x1b[97;3u", ["alt+a"]),
        ("\x1b[?61;6;7;22;52c\x1b[>0;276;0ck", ["k"]),
        ("\x1b[201~k", ["k"]),
    ],
)
def test_escape_and_a_key_at_once_are_two_keys(sent: str, keys: list[str]) -> None:
    assert _keys(sent) == keys


def test_a_key_that_is_bound_with_alt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TerminalInput, "alt_keys", frozenset({"alt+x"}))
    assert _keys("\x1bx") == ["alt+x"]


@pytest.mark.parametrize(
    ("sent", "keys"),
    [("\x1bb", ["escape", "b"]), ("\x1bf", ["escape", "f"]), ("\x1b\r", ["escape", "enter"])],
)
def test_where_no_text_is_nothing_moves_by_words(monkeypatch: pytest.MonkeyPatch, sent: str, keys: list[str]) -> None:
    monkeypatch.setattr(TerminalInput, "has_text", staticmethod(lambda: False))
    assert _keys(sent) == keys
    assert _keys("\x1b[1;5D", "\x1b\x7f") == ["ctrl+left", "ctrl+w"]


PIECES = [*"a\x1b[201~\x11\x07\n;m日", "\x1b[106;5u", "\x1b[27;5;106~"]
PASTED = st.lists(st.sampled_from(PIECES), max_size=12).map("".join).filter(lambda text: "\x1b[201~" not in text)


@given(before=st.sampled_from(["", "k"]), pasted=PASTED, data=st.data())
def test_a_paste_is_one_whatever_is_in_it_and_however_it_comes(before: str, pasted: str, data: st.DataObject) -> None:
    sent = f"{before}\x1b[200~{pasted}\x1b[201~q"
    after_start = len(before) + len("\x1b[200~")
    cuts = sorted(data.draw(st.lists(st.integers(after_start, len(sent)), max_size=3)))
    pieces = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    parser = TerminalInput()
    found = [event for piece in pieces if piece for event in parser.feed(piece)]
    keys = [event.key for event in found if isinstance(event, events.Key)]
    assert keys == [*before, "q"]
    pastes = [event.text for event in found if isinstance(event, events.Paste)]
    assert pastes == [pasted.replace("\x1b[106;5u", "\n").replace("\x1b[27;5;106~", "\n").replace("\x1b", "")]


@pytest.mark.parametrize(
    ("sent", "pasted"),
    [
        ("def f():\r\r    return 1\r\rf()\r\r", "def f():\n    return 1\nf()\n"),
        ("a;\r\r\r\rb", "a;\n\nb"),
        ("Dear Ann,\r\rone.\r\rTwo.", "Dear Ann,\n\none.\n\nTwo."),
        ("if x:\r    y = 1\r\rz", "if x:\n    y = 1\n\nz"),
    ],
)
def test_a_paste_of_doubled_line_ends_has_them_once(sent: str, pasted: str) -> None:
    (paste,) = TerminalInput().feed(f"\x1b[200~{sent}\x1b[201~")
    assert isinstance(paste, events.Paste)
    assert paste.text == pasted


def test_a_paste_whose_end_is_lost_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = TerminalInput()
    assert list(parser.feed("\x1b[200~half\x1b[2")) == list(parser.tick()) == []
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.0)
    (paste,) = parser.tick()
    assert isinstance(paste, events.Paste)
    assert paste.text == "half[2"
    assert [event.key for event in parser.feed("x") if isinstance(event, events.Key)] == ["x"]
