"""What a terminal is sent for real pictures, and which terminals are sent it."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest
from PIL import Image

from localrun.tui import kitty_graphics as kitty
from localrun.tui.pictures import PictureKey, Thumbnails, as_placeholders


@pytest.fixture(autouse=True)
def outside_of_tmux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMUX", "TMUX_PANE", "KITTY_WINDOW_ID", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)


def _png(size: tuple[int, int] = (400, 300)) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 90).save(file, "PNG")
    return file.getvalue()


def test_each_cell_names_its_row_and_column_in_the_colour_of_the_picture() -> None:
    strips = kitty.placeholders(0x123456, 3, 2)
    assert [strip.cell_length for strip in strips] == [3, 3]
    assert strips[1].text == "\U0010eeee\u030d\u0305\U0010eeee\u030d\u030d\U0010eeee\u030d\u030e"
    assert {segment.style.color.triplet.hex for strip in strips for segment in strip} == {"#123456"}
    # Cut off at both sides, as by a window in front of it, each cell is still whole.
    assert strips[0].crop(1, 2).text == "\U0010eeee\u0305\u030d"
    largest = kitty.placeholders(1, kitty.MAX_COLUMNS, kitty.MAX_ROWS)
    assert len({strip.text for strip in largest}) == kitty.MAX_ROWS
    assert {strip.cell_length for strip in (strip.simplify() for strip in largest)} == {kitty.MAX_COLUMNS}


def test_a_picture_is_sent_in_chunks_that_the_terminal_does_not_answer() -> None:
    png = _png()
    pieces = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", kitty.shown(77, png, 20, 8))
    assert "".join(f"\x1b_G{keys};{content}\x1b\\" for keys, content in pieces) == kitty.shown(77, png, 20, 8)
    assert len(pieces) > 2
    assert pieces[0][0] == "a=T,U=1,i=77,f=100,c=20,r=8,q=2,m=1"
    assert {keys for keys, _ in pieces[1:-1]} == {"q=2,m=1"}
    assert pieces[-1][0] == "q=2,m=0"
    assert max(len(content) for _, content in pieces) == 4096
    assert base64.b64decode("".join(content for _, content in pieces)) == png
    assert kitty.removed(77) == "\x1b_Ga=d,d=I,i=77,q=2\x1b\\"


def test_tmux_passes_every_chunk_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kitty.shown(77, _png(), 20, 8)
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    wrapped = re.findall(r"\x1bPtmux;((?:[^\x1b]|\x1b\x1b)*)\x1b\\", kitty.shown(77, _png(), 20, 8))
    assert "".join(wrapped).count("\x1b\x1b_G") == plain.count("\x1b_G")
    assert kitty.removed(5) == "\x1bPtmux;\x1b\x1b_Ga=d,d=I,i=5,q=2\x1b\x1b\\\x1b\\"


@pytest.mark.parametrize(
    ("environment", "is_named"),
    [
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-ghostty"}, True),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, True),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, True),
        ({"TERM": "xterm-256color"}, False),
        ({"TERM": "linux", "KITTY_WINDOW_ID": "1"}, False),
        ({"TERM": "screen-256color", "KITTY_WINDOW_ID": "1"}, False),
        ({"TERM": "xterm-kitty", "TMUX": "x"}, False),
        ({}, False),
    ],
)
def test_terminals_are_known_by_name(environment: dict[str, str], is_named: bool) -> None:
    assert kitty.is_named(environment) is is_named


@pytest.mark.parametrize(
    ("answer", "is_capable"),
    [
        ("on xterm-kitty,bpaste,focus kitty(0.41.1)", True),
        ("1 xterm-ghostty,title ghostty 1.1.3", True),
        ("all xterm-256color,RGB,title kitty(1.2.0)", True),
        ("off xterm-kitty,bpaste kitty(0.41.1)", False),
        ("0 xterm-kitty,bpaste kitty(0.41.1)", False),
        ("on xterm-kitty,bpaste kitty(0.26.5)", False),
        ("on xterm-256color,title kitty(0.41.1)", False),  # 256 colours are too few for numbers
        ("on xterm-256color,RGB XTerm(379)", False),
        ("on xterm-256color,RGB ", False),
        ("", False),
    ],
)
def test_tmux_knows_the_terminal_outside(
    answer: str, is_capable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "tmux"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert kitty.is_outside_of_tmux({"TMUX": "x", "TMUX_PANE": "%1"}) is is_capable
    assert kitty.is_outside_of_tmux({"TMUX_PANE": "%1"}) is False


async def test_the_terminal_forgets_what_is_no_longer_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.tui.pictures._MAX_REMEMBERED", 2)
    sent: list[str] = []
    thumbnails = Thumbnails(as_placeholders(), sent.append)
    keys = [PictureKey(name, 4, 2) for name in "abcd"]
    for key in keys:
        assert await thumbnails.make(key, _png) is not None
    assert await thumbnails.make(keys[0], _png) is not None  # shown twice, sent once
    assert [piece[:6] for piece in sent] == ["\x1b_Ga=T"] * 4
    numbers = [re.search(r"i=(\d+)", piece)[1] for piece in sent]  # type: ignore[index]
    sent.clear()
    thumbnails.release(keys)
    assert sent == [kitty.removed(int(numbers[at])) for at in (1, 2)]  # the first is still shown, the last is recent
    sent.clear()
    thumbnails.send_again()
    assert re.findall(r"a=T,U=1,i=(\d+)", sent[0]) == [numbers[3], numbers[0]]
    sent.clear()
    thumbnails.close()
    assert sent == [kitty.removed(int(numbers[3])) + kitty.removed(int(numbers[0]))]
    thumbnails.release(keys[:1])
    thumbnails.close()
    assert sent[1:] == [""]
