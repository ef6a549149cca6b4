"""Pictures as blocks of colour, and files that are none."""

from __future__ import annotations

import asyncio
import io
import zlib
from typing import Any

import pytest
from PIL import Image

from localrun.tui import pictures
from localrun.tui.pictures import PictureKey, Thumbnails, fitted, half_blocks, png, size_of


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
