"""Pictures as blocks of colour and as placeholders, and files that are none."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localrun.tui import pictures
from localrun.tui.pictures import (
    MAX_COLUMNS,
    MAX_ROWS,
    PictureKey,
    Thumbnails,
    as_placeholders,
    fitted,
    half_blocks,
    is_kitty,
    is_kitty_around_tmux,
    placeholders,
    png,
    removing,
    showing,
    size_of,
)


@pytest.fixture(autouse=True)
def outside_of_tmux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMUX", "TMUX_PANE", "KITTY_WINDOW_ID", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)


def _file(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def _colours(data: bytes, columns: int, rows: int) -> list[list[tuple[str, str]]]:
    """Of each cell, above and below."""
    strips = half_blocks(data, columns, rows)
    assert strips is not None
    assert [strip.cell_length for strip in strips] == [columns] * rows
    assert {segment.text for strip in strips for segment in strip} == {"▀"}
    return [[(s.style.color.name, s.style.bgcolor.name) for s in strip] for strip in strips]


def _quarters() -> Image.Image:
    picture = Image.new("RGB", (40, 40), "#ff0000")
    picture.paste("#00ff00", (20, 0, 40, 20))
    picture.paste("#0000ff", (0, 20, 40, 40))
    return picture


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "WEBP"])
def test_a_cell_is_two_pixels(form: str):
    data = _file(_quarters(), form, **({"lossless": True} if form == "WEBP" else {}))
    assert size_of(data) == (40, 40)
    assert _colours(data, 2, 1) == [[("#ff0000", "#0000ff"), ("#00ff00", "#0000ff")]]


def test_a_photo_is_turned_as_its_camera_was_held():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = _file(Image.new("RGB", (400, 200), "#808080"), "JPEG", exif=exif)
    assert size_of(data) == (200, 400)
    assert _colours(data, 1, 1) == [[("#808080", "#808080")]]


def test_what_can_be_seen_through_is_on_white_as_for_the_model():
    assert _colours(_file(Image.new("RGBA", (2, 2), "#ff000000")), 1, 1) == [[("#ffffff", "#ffffff")]]


def test_the_size_in_cells_keeps_the_shape_and_never_grows():
    assert fitted(4000, 3000, 40, 12) == (32, 12)
    assert fitted(4000, 500, 40, 12) == (40, 2)
    assert fitted(8, 8, 40, 12) == (8, 4)
    assert fitted(10_000, 1, 40, 12) == (40, 1)
    assert fitted(0, 0, 40, 12) == fitted(8000, 8000, 40, 12) == (0, 0)


def _huge() -> bytes:
    """A PNG of 30000 x 30000 pixels in a few bytes."""
    header = b"IHDR" + (30_000).to_bytes(4, "big") * 2 + b"\x08\x00\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x0d" + header + zlib.crc32(header).to_bytes(4, "big") + b"\0\0\0\x09IDAT"


def test_a_huge_picture_is_not_decoded():
    assert size_of(_huge()) == (30_000, 30_000)
    assert half_blocks(_huge(), 10, 5) is None
    assert png(_huge(), 10, 5) is None


def test_a_small_file_keeps_the_shape_and_is_never_larger():
    made = png(_file(_quarters()), 30, 100)
    assert made is not None
    assert size_of(made) == (30, 30)
    assert size_of(png(_file(Image.new("RGBA", (8, 4))), 400, 400) or b"") == (8, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\nno picture",
        _file(_quarters())[:60],
        _file(_quarters(), "JPEG")[:200],
        _file(_quarters(), "TIFF"),  # no model takes these
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ],
)
def test_what_is_no_picture_is_none(data: bytes):
    assert half_blocks(data, 10, 5) is None


async def test_pictures_are_made_one_at_a_time_and_once(monkeypatch: pytest.MonkeyPatch):
    at_work: list[str] = []
    most = []

    def make(data: bytes, columns: int, rows: int) -> None:
        at_work.append("x")
        most.append(len(at_work))
        at_work.pop()

    monkeypatch.setattr(pictures, "_MAX_REMEMBERED", 3)
    thumbnails = Thumbnails(make)
    asked = [
        PictureKey("a", 1, 1),
        PictureKey("b", 1, 1),
        PictureKey("a", 1, 1),
        PictureKey("a", 2, 1),
        PictureKey("c", 1, 1),
    ]
    await asyncio.gather(*(thumbnails.make(key, lambda: b"") for key in asked))
    thumbnails.release(asked)
    assert most == [1] * 4
    await thumbnails.make(PictureKey("c", 1, 1), lambda: b"")
    assert len(most) == 4
    await thumbnails.make(PictureKey("b", 1, 1), lambda: b"")  # it was the one to be forgotten
    assert len(most) == 5


# --- real ones ---


def _noise(size: tuple[int, int] = (400, 300)) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 90).save(file, "PNG")
    return file.getvalue()


def test_each_cell_names_its_row_and_column_in_the_colour_of_the_picture() -> None:
    strips = placeholders(0x123456, 3, 2)
    assert [strip.cell_length for strip in strips] == [3, 3]
    assert strips[1].text == "\U0010eeee\u030d\u0305\U0010eeee\u030d\u030d\U0010eeee\u030d\u030e"
    assert {segment.style.color.triplet.hex for strip in strips for segment in strip} == {"#123456"}
    # Cut off at both sides, as by a window in front of it, each cell is still whole.
    assert strips[0].crop(1, 2).text == "\U0010eeee\u0305\u030d"
    largest = placeholders(1, MAX_COLUMNS, MAX_ROWS)
    assert len({strip.text for strip in largest}) == MAX_ROWS
    assert {strip.cell_length for strip in (strip.simplify() for strip in largest)} == {MAX_COLUMNS}


def test_a_picture_is_sent_in_chunks_that_the_terminal_does_not_answer() -> None:
    picture = _noise()
    pieces = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", showing(77, picture, 20, 8))
    assert "".join(f"\x1b_G{keys};{content}\x1b\\" for keys, content in pieces) == showing(77, picture, 20, 8)
    assert len(pieces) > 2
    assert pieces[0][0] == "a=T,U=1,i=77,f=100,c=20,r=8,q=2,m=1"
    assert {keys for keys, _ in pieces[1:-1]} == {"q=2,m=1"}
    assert pieces[-1][0] == "q=2,m=0"
    assert max(len(content) for _, content in pieces) == 4096
    assert base64.b64decode("".join(content for _, content in pieces)) == picture
    assert removing(77) == "\x1b_Ga=d,d=I,i=77,q=2\x1b\\"


def test_tmux_passes_every_chunk_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = showing(77, _noise(), 20, 8)
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    wrapped = re.findall(r"\x1bPtmux;((?:[^\x1b]|\x1b\x1b)*)\x1b\\", showing(77, _noise(), 20, 8))
    assert "".join(wrapped).count("\x1b\x1b_G") == plain.count("\x1b_G")
    assert removing(5) == "\x1bPtmux;\x1b\x1b_Ga=d,d=I,i=5,q=2\x1b\x1b\\\x1b\\"


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
    assert is_kitty(environment) is is_named


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
    assert is_kitty_around_tmux({"TMUX": "x", "TMUX_PANE": "%1"}) is is_capable
    assert is_kitty_around_tmux({"TMUX_PANE": "%1"}) is False


async def test_the_terminal_forgets_what_is_no_longer_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.tui.pictures._MAX_REMEMBERED", 2)
    sent: list[str] = []
    thumbnails = Thumbnails(as_placeholders(), sent.append)
    keys = [PictureKey(name, 4, 2) for name in "abcd"]
    for key in keys:
        assert await thumbnails.make(key, _noise) is not None
    assert await thumbnails.make(keys[0], _noise) is not None  # shown twice, sent once
    assert [piece[:6] for piece in sent] == ["\x1b_Ga=T"] * 4
    numbers = [re.search(r"i=(\d+)", piece)[1] for piece in sent]  # type: ignore[index]
    sent.clear()
    thumbnails.release(keys)
    assert sent == [removing(int(numbers[at])) for at in (1, 2)]  # the first is still shown, the last is recent
    sent.clear()
    thumbnails.send_again()
    assert re.findall(r"a=T,U=1,i=(\d+)", sent[0]) == [numbers[3], numbers[0]]
    sent.clear()
    thumbnails.close()
    assert sent == [removing(int(numbers[3])) + removing(int(numbers[0]))]
    thumbnails.release(keys[:1])
    thumbnails.close()
    assert sent[1:] == [""]
