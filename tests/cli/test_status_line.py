"""The status line takes the last row while it is open, and always gives it back."""

from __future__ import annotations

import io
import os

import pytest

from localrun.cli.status_line import StatusLine


class Terminal(io.StringIO):
    """Records what is written; its size can change."""

    size = os.terminal_size((40, 24))

    def fileno(self) -> int:
        return 99


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: terminal.size)
    return terminal


def test_text_scrolls_above_the_last_row_while_it_is_open(terminal):
    with StatusLine(terminal) as line:
        assert "\x1b[1;23r" in terminal.getvalue()
        line.show("55 tokens/s")
        assert "\x1b[24;1H\x1b[2K\x1b[2m55 tokens/s\x1b[0m\x1b8" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b7\x1b[24;1H\x1b[2K\x1b[r\x1b8")


def test_the_row_is_given_back_when_the_answer_fails(terminal):
    with pytest.raises(KeyboardInterrupt), StatusLine(terminal):
        raise KeyboardInterrupt
    assert "\x1b[r" in terminal.getvalue()


def test_a_long_text_never_wraps(terminal):
    with StatusLine(terminal) as line:
        line.show("x" * 100)
    assert "x" * 39 in terminal.getvalue()
    assert "x" * 40 not in terminal.getvalue()


def test_a_resized_terminal_gets_its_row_back_and_no_more_lines(terminal):
    with StatusLine(terminal) as line:
        terminal.size = os.terminal_size((40, 30))
        line.show("one")
        assert terminal.getvalue().count("\x1b[r") == 1
        line.show("two")
    assert "one" not in terminal.getvalue()
    assert "two" not in terminal.getvalue()
    assert terminal.getvalue().count("\x1b[r") == 1


def test_a_tiny_terminal_gets_none(terminal):
    terminal.size = os.terminal_size((40, 2))
    with StatusLine(terminal) as line:
        line.show("one")
    assert terminal.getvalue() == ""
