"""Pictures as cells of a terminal: each cell is an upper half block with one colour for the block and one behind it, so
that a column of cells is two pixels a row.

A picture may come from anywhere. It is decoded by Pillow, by the five decoders that are needed, and only when its
header says that it is not too large. Decoding takes up to a second, so it is done in a thread, one at a time, and its
result is remembered.

Does not: know widgets, or where files are kept.
"""

from __future__ import annotations

import asyncio
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

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
    """The picture in so many cells, on white as a model sees it; None when it cannot be decoded. Takes long."""
    from PIL import Image, ImageOps

    try:
        with _opened(data) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                return None
            picture.draft("RGB", (columns * 2, rows * 4))  # a JPEG is decoded at an eighth of its size
            small = ImageOps.exif_transpose(picture).convert("RGBA")
        small = small.resize((columns, rows * 2), Image.Resampling.BOX)
        shown = Image.alpha_composite(Image.new("RGBA", small.size, "white"), small).convert("RGB")
    except Exception:  # as above, and MemoryError
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


def _opened(data: bytes) -> Image.Image:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # it would warn on the screen; the limit here is lower
    return Image.open(io.BytesIO(data), formats=_FORMATS)


class Thumbnails:
    """Makes pictures as cells, one at a time, and remembers the latest. Owned by the event loop."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[str, int, int], list[Strip] | None] = OrderedDict()
        self._turn = asyncio.Lock()

    async def make(self, sha256: str, columns: int, rows: int, load: Callable[[], bytes | None]) -> list[Strip] | None:
        """As `half_blocks`, for the bytes that `load` gives in a thread."""

        def work() -> list[Strip] | None:
            data = load()
            return None if data is None else half_blocks(data, columns, rows)

        key = (sha256, columns, rows)
        async with self._turn:
            if key not in self._made:
                self._made[key] = await asyncio.to_thread(work)
            self._made.move_to_end(key)
            while len(self._made) > _MAX_REMEMBERED:
                self._made.popitem(last=False)
            return self._made[key]
