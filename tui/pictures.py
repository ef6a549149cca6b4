"""Pictures as cells of a terminal: as placeholders, where the terminal draws the picture itself (`kitty_graphics.py`),
and elsewhere as half blocks, with one colour for the block and one behind it, so that a row of cells is two of pixels.

A picture may come from anywhere. It is decoded by Pillow, by the five decoders that are needed, and only when its
header says that it is not too large. Decoding takes up to a second, so it is done in a thread, one at a time, and its
result is remembered.

Does not: know widgets, or where files are kept.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from localrun.tui import kitty_graphics

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 40_000_000
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_ORIENTATION = 0x0112
_MAX_REMEMBERED = 64


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, as it is seen (a photo may lie on its side); (0, 0) when the header is no good."""
    from PIL import Image

    try:
        with _opened(data) as picture:
            width, height = picture.size
            exif = Image.Exif()
            exif.load(picture.info.get("exif", b""))  # `getexif` would decode a PNG
            is_on_its_side = exif.get(_ORIENTATION, 1) >= 5
    except Exception:  # decoders raise what they like on a damaged file
        return 0, 0
    return (height, width) if is_on_its_side else (width, height)


def fitted(width: int, height: int, max_columns: int, max_rows: int) -> tuple[int, int]:
    """Columns and rows for a picture, which is never enlarged; (0, 0) for one that is not drawn."""
    if min(width, height, max_columns, max_rows) <= 0 or width * height > MAX_PIXELS:
        return 0, 0
    scale = min(max_columns / width, max_rows * 2 / height, 1.0)
    return max(1, round(width * scale)), max(1, round(height * scale / 2))


def half_blocks(data: bytes, columns: int, rows: int) -> list[Strip] | None:
    """The picture in so many cells; None when it cannot be decoded. Takes long."""
    shown = _shrunk(data, columns, rows * 2, keep_shape=False)
    if shown is None:
        return None
    pixels = shown.tobytes()
    colours = [Color.from_rgb(*pixels[at : at + 3]) for at in range(0, len(pixels), 3)]
    return [
        Strip(
            [
                Segment("▀", Style(color=colours[2 * row * columns + x], bgcolor=colours[(2 * row + 1) * columns + x]))
                for x in range(columns)
            ],
            columns,
        )
        for row in range(rows)
    ]


def png(data: bytes, width: int, height: int) -> bytes | None:
    """The picture in at most so many pixels, as a small file; None when it cannot be decoded. Takes long."""
    shown = _shrunk(data, width, height, keep_shape=True)
    if shown is None:
        return None
    file = io.BytesIO()
    shown.save(file, "PNG")
    return file.getvalue()


def _shrunk(data: bytes, width: int, height: int, *, keep_shape: bool) -> Image.Image | None:
    """Of exactly that size, or of that at most; on white, as a model sees it."""
    from PIL import Image, ImageOps

    try:
        with _opened(data) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                return None
            # A JPEG is decoded at an eighth of its size.
            picture.draft("RGB", (width, height) if keep_shape else (width * 2, height * 2))
            small = ImageOps.exif_transpose(picture).convert("RGBA")
        if keep_shape:
            small.thumbnail((width, height), Image.Resampling.LANCZOS)
        else:
            small = small.resize((width, height), Image.Resampling.BOX)
        return Image.alpha_composite(Image.new("RGBA", small.size, "white"), small).convert("RGB")
    except Exception:  # as above, and MemoryError
        return None


def _opened(data: bytes) -> Image.Image:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # it would warn on the screen; the limit here is lower
    return Image.open(io.BytesIO(data), formats=_FORMATS)


class DrawnPicture(NamedTuple):
    """A drawn picture. The terminal must have been sent `before` when `strips` are shown, and is sent `after` when they
    no longer are."""

    strips: list[Strip]
    before: str = ""
    after: str = ""


Draw = Callable[[bytes, int, int], DrawnPicture | None]
"""Draws the bytes of a picture in so many columns and rows; None for what cannot be drawn. In a thread."""


def as_blocks(data: bytes, columns: int, rows: int) -> DrawnPicture | None:
    strips = half_blocks(data, columns, rows)
    return None if strips is None else DrawnPicture(strips)


def as_placeholders() -> Draw:
    """Begins with any number, as other programs in this terminal number their pictures, too."""
    numbers = itertools.count(random.randrange(kitty_graphics.MAX_NUMBER))

    def draw(data: bytes, columns: int, rows: int) -> DrawnPicture | None:
        width, height = kitty_graphics.cell_pixels()
        small = png(data, columns * width, rows * height)
        if small is None:
            return None
        number = next(numbers) % kitty_graphics.MAX_NUMBER + 1
        return DrawnPicture(
            kitty_graphics.placeholders(number, columns, rows),
            kitty_graphics.shown(number, small, columns, rows),
            kitty_graphics.removed(number),
        )

    return draw


class PictureKey(NamedTuple):
    sha256: str
    columns: int
    rows: int


class Thumbnails:
    """Draws pictures, one at a time, and remembers those that are shown and the latest others. Owned by the event loop.

    Nothing is drawn without `draw`. `write` sends to the terminal.
    """

    def __init__(self, draw: Draw | None = as_blocks, write: Callable[[str], None] = lambda sequences: None) -> None:
        self.draw = draw
        self._write = write
        self._made: OrderedDict[PictureKey, DrawnPicture | None] = OrderedDict()
        self._n_shown: Counter[PictureKey] = Counter()
        self._turn = asyncio.Lock()

    async def make(self, key: PictureKey, load: Callable[[], bytes | None]) -> list[Strip] | None:
        """The picture whose bytes `load` gives in a thread; None if it cannot be drawn. Whoever shows it says when it
        is no longer shown (`release`)."""

        def work(draw: Draw | None) -> DrawnPicture | None:
            data = load()
            return None if data is None or draw is None else draw(data, key.columns, key.rows)

        async with self._turn:
            if key not in self._made:
                cells = self._made[key] = await asyncio.to_thread(work, self.draw)
                if cells is not None:
                    self._write(cells.before)
            self._n_shown[key] += 1
            self._made.move_to_end(key)
            self._forget_oldest()
            cells = self._made[key]
        return None if cells is None else cells.strips

    def release(self, keys: Iterable[PictureKey]) -> None:
        """These are no longer shown where they were made for."""
        self._n_shown.subtract(tuple(keys))  # a mapping would be one of numbers
        self._forget_oldest()

    def send_again(self) -> None:
        """The terminal has forgotten what it was sent."""
        self._write("".join(cells.before for cells in self._made.values() if cells is not None))

    def close(self) -> None:
        """Frees what the terminal holds."""
        self._write("".join(cells.after for cells in self._made.values() if cells is not None))
        self._made.clear()

    def _forget_oldest(self) -> None:
        unused = [key for key in self._made if self._n_shown[key] <= 0]
        for key in unused[: max(0, len(self._made) - _MAX_REMEMBERED)]:
            cells = self._made.pop(key)
            del self._n_shown[key]
            if cells is not None:
                self._write(cells.after)
