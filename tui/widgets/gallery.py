"""The pictures and sounds of a question: pictures drawn small, several beside each other, with a line below that names
them; sounds as a line. Where a terminal has sixteen colours, or a picture cannot be drawn, a line too.

The room that a picture takes is known before it is decoded, so nothing moves when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from localrun.attachments import Kind
from localrun.tui import short_text
from localrun.tui.media import Medium
from localrun.tui.pictures import PictureKey, Thumbnails, fitted
from localrun.tui.short_text import fit

# Of one picture, and of each of several.
_ALONE, _BESIDE = (40, 12), (22, 8)
_GAP = 2
_NAME_WIDTH = 8
_COLOURS = ("truecolor", "256")


class Gallery(Widget):
    """`load` gives the bytes of a file by its SHA-256, in a thread; None when it is gone."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"gallery--name", "gallery--waiting"}

    def __init__(self, media: Sequence[Medium], thumbnails: Thumbnails, load: Callable[[str], bytes | None]) -> None:
        super().__init__()
        self._media = media
        self._thumbnails = thumbnails
        self._load = load
        self._drawn: dict[PictureKey, list[Strip] | None] = {}

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def on_unmount(self) -> None:
        self._thumbnails.release(self._drawn)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        pictures, lines = self._tiles(width)
        return sum(max(rows for _, _, rows in tiles) + 1 for tiles in pictures) + len(lines)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        pictures, lines = self._tiles(width)
        for tiles in pictures:
            height = max(rows for _, _, rows in tiles)
            if y < height:
                return self._across([(self._row(*tile, y - height + tile[2]), tile[1]) for tile in tiles])
            if y == height:
                room = width if len(tiles) == 1 else _BESIDE[0]
                return self._across([(self._caption(medium, room), room) for medium, _, _ in tiles])
            y -= height + 1
        return self._across([(self._caption(lines[y], width), width)] if y < len(lines) else [])

    def _tiles(self, width: int) -> tuple[list[list[tuple[Medium, int, int]]], list[Medium]]:
        """Rows of pictures with the columns and rows of each, and what is only named."""
        can_draw = self._thumbnails.draw is not None and self.app.console.color_system in _COLOURS
        candidates = [medium for medium in self._media if can_draw and medium.kind is Kind.PICTURE]
        max_columns, max_rows = _ALONE if len(candidates) == 1 else _BESIDE
        max_rows = min(max_rows, max(4, self.screen.size.height // 3))
        tiles, lines = [], []
        for medium in self._media:
            columns, rows = 0, 0
            if medium in candidates:
                columns, rows = fitted(medium.width, medium.height, min(max_columns, width), max_rows)
            if rows and self._drawn.get(PictureKey(medium.sha256, columns, rows), []) is not None:
                tiles.append((medium, columns, rows))
            else:
                lines.append(medium)
        n_beside = max(1, (width + _GAP) // (_BESIDE[0] + _GAP))
        return [tiles[at : at + n_beside] for at in range(0, len(tiles), n_beside)], lines

    def _row(self, medium: Medium, columns: int, rows: int, y: int) -> Strip:
        drawn = self._drawn.get(PictureKey(medium.sha256, columns, rows))
        if y < 0:  # a lower picture stands on its name
            return Strip.blank(columns, self.rich_style)
        if not drawn:
            return Strip.blank(columns, self.get_component_rich_style("gallery--waiting"))
        return drawn[y].apply_style(self.rich_style)  # behind a picture that does not fill its cells

    def _caption(self, medium: Medium, room: int) -> Strip:
        return Strip([Segment(summary(medium, room), self.get_component_rich_style("gallery--name"))])

    def _across(self, parts: list[tuple[Strip, int]]) -> Strip:
        """Beside each other, in columns of the same width."""
        placed = [
            strip.adjust_cell_length((_BESIDE[0] + _GAP) if len(parts) > 1 else width, self.rich_style)
            for strip, width in parts
        ]
        return Strip.join(placed).adjust_cell_length(self.size.width, self.rich_style)

    def _draw(self) -> None:
        wanted = [tile for tiles in self._tiles(self.size.width)[0] for tile in tiles]
        keys = dict.fromkeys(PictureKey(medium.sha256, columns, rows) for medium, columns, rows in wanted)
        if missing := [key for key in keys if key not in self._drawn]:
            self.run_worker(self._make(missing), name="pictures", group="pictures", exclusive=True)

    async def _make(self, keys: list[PictureKey]) -> None:
        for key in keys:
            made = self._drawn[key] = await self._thumbnails.make(key, partial(self._load, key.sha256))
            self.refresh(layout=made is None)


def summary(medium: Medium, width: int) -> str:
    """Name, size in pixels or length, and size in one line; what does not fit beside a short name is left out."""
    facts = [short_text.size(medium.size_bytes)]
    if medium.width:
        facts.append(f"{medium.width}×{medium.height}")
    if medium.seconds:
        minutes, seconds = divmod(round(medium.seconds), 60)
        facts.append(f"{minutes}:{seconds:02d}")
    name = fit(medium.name, width)
    while facts and width - len(" · ".join(["▣ ", *facts])) < min(_NAME_WIDTH, cell_len(name)):
        facts.pop()
    mark = "♪" if medium.kind is Kind.SOUND else "▣"
    room = width - len(" · ".join(["▣ ", *facts]))
    return " · ".join([f"{mark} {fit(name, room)}", *reversed(facts)])
