"""Pictures as cells of a terminal: as placeholders, where the terminal draws the picture itself, and elsewhere as half
blocks, with one colour for the block and one behind it, so that a row of cells is two of pixels.

A picture may come from anywhere. It is decoded by Pillow, by the five decoders that are needed, and only when its
header says that it is not too large. Decoding takes up to a second, so it is done in a thread, one at a time, and its
result is remembered.

Placeholders are of kitty's graphics protocol: kitty from 0.28 on, and Ghostty; also inside tmux, where it lets
sequences through (`allow-passthrough`). A picture is sent once, under a number. Wherever a placeholder character is
written afterwards, in a colour that is this number, the terminal draws the piece of the picture that two combining
characters name: its row and its column. So pictures are text to everything between here and the terminal, and scroll,
move and are cut off as text is.

Elsewhere placeholders are boxes, so they are used only where they are known to work. `is_kitty` is what the environment
says; that the terminal is new enough too is known when it reports its size in band (DEC mode 2048), which textual asks
for anyway: kitty learned that after placeholders. So no question of our own waits for an answer, or finds one among the
keys. Inside tmux, tmux knows what is outside of it.

Does not: know widgets, or where files are kept.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import random
import re
import struct
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from localrun.processes import run_text

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
    numbers = itertools.count(random.randrange(MAX_NUMBER))

    def draw(data: bytes, columns: int, rows: int) -> DrawnPicture | None:
        width, height = cell_pixels()
        small = png(data, columns * width, rows * height)
        if small is None:
            return None
        number = next(numbers) % MAX_NUMBER + 1
        return DrawnPicture(
            placeholders(number, columns, rows), showing(number, small, columns, rows), removing(number)
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


# --- kitty's protocol: what the terminal is sent ---

_PLACEHOLDER = "\U0010eeee"
# What kitty's rowcolumn-diacritics.txt begins with: the number of a row or a column is the place of its character.
_NUMBERS = (
    "\u0305\u030d\u030e\u0310\u0312\u033d\u033e\u033f\u0346\u034a\u034b\u034c\u0350\u0351\u0352\u0357\u035b\u0363"
    "\u0364\u0365\u0366\u0367\u0368\u0369\u036a\u036b\u036c\u036d\u036e\u036f\u0483\u0484\u0485\u0486\u0487\u0592"
    "\u0593\u0594\u0595\u0597"
)
MAX_COLUMNS = MAX_ROWS = len(_NUMBERS)
MAX_NUMBER = 0xFFFFFF
_CHUNK_CHARACTERS = 4096
_QUIETLY = "q=2"  # an answer would arrive as keys

_TERMS = ("xterm-kitty", "xterm-ghostty")
# The first versions with placeholders.
_VERSIONS = {"kitty": (0, 28), "ghostty": (1, 0)}
_TMUX_TIMEOUT_S = 2.0
_USUAL_CELL = (10, 20)


def placeholders(number: int, columns: int, rows: int) -> list[Strip]:
    """The picture with this number, as text."""
    style = Style(color=Color.from_rgb(number >> 16, number >> 8 & 0xFF, number & 0xFF))
    return [
        Strip([Segment("".join(_PLACEHOLDER + _NUMBERS[row] + _NUMBERS[x] for x in range(columns)), style)], columns)
        for row in range(rows)
    ]


def has_placeholders(text: str) -> bool:
    return _PLACEHOLDER in text


def showing(number: int, png: bytes, columns: int, rows: int) -> str:
    """Makes the placeholders of a number be this picture, which is fitted into so many cells."""
    content = base64.b64encode(png).decode("ascii")
    chunks = [content[at : at + _CHUNK_CHARACTERS] for at in range(0, len(content), _CHUNK_CHARACTERS)]
    keys = f"a=T,U=1,i={number},f=100,c={columns},r={rows},{_QUIETLY}"
    return "".join(
        _sequence(f"{keys if at == 0 else _QUIETLY},m={int(at + 1 < len(chunks))};{chunk}")
        for at, chunk in enumerate(chunks)
    )


def removing(number: int) -> str:
    """Makes the terminal forget a picture."""
    return _sequence(f"a=d,d=I,i={number},{_QUIETLY}")


def _sequence(command: str) -> str:
    sequence = f"\x1b_G{command}\x1b\\"
    if "TMUX" in os.environ:
        return "\x1bPtmux;{}\x1b\\".format(sequence.replace("\x1b", "\x1b\x1b"))
    return sequence


def cell_pixels() -> tuple[int, int]:
    """Width and height of a cell; the usual ones where the terminal does not say."""
    if sys.platform == "win32" or sys.__stdin__ is None:
        return _USUAL_CELL
    import fcntl
    import termios

    try:
        size = fcntl.ioctl(sys.__stdin__.fileno(), termios.TIOCGWINSZ, bytes(8))
    except (OSError, ValueError):
        return _USUAL_CELL
    rows, columns, width, height = struct.unpack("HHHH", size)
    return (width // columns, height // rows) if rows and columns and width and height else _USUAL_CELL


# --- which terminals understand it ---


def is_kitty(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that this is kitty or Ghostty, without tmux or another program between."""
    term = environment.get("TERM", "")
    is_inside = "KITTY_WINDOW_ID" in environment or environment.get("TERM_PROGRAM") == "ghostty"
    return "TMUX" not in environment and (term in _TERMS or (is_inside and "xterm" in term))


def is_kitty_around_tmux(environment: Mapping[str, str]) -> bool:
    """Whether tmux runs here, in such a terminal, and lets pictures and their colours through. Asks tmux."""
    if "TMUX" not in environment:
        return False
    asked = "#{allow-passthrough} #{client_termname},#{client_termfeatures} #{client_termtype}"
    command = ["tmux", "display-message", "-p", "-t", environment.get("TMUX_PANE", ""), asked]
    try:
        ended = run_text(command, _TMUX_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.match(r"(?:1|2|on|all) (\S+) (\w+)[ (](\d+)\.(\d+)", ended.stdout)
    if found is None or not {*_TERMS, "RGB"} & {*found[1].split(",")}:  # the terminfo of the former has all colours
        return False
    needed = _VERSIONS.get(found[2].lower())
    return needed is not None and (int(found[3]), int(found[4])) >= needed
