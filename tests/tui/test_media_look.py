"""How attachments and pictures look, at the sizes of the other screens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from textual.pilot import Pilot

from localrun.tui.widgets.prompt import Prompt

SIZES = {"80x24": (80, 24), "120x40": (120, 40)}


def _landscape(path: Path, size: tuple[int, int]) -> Path:
    """Of few colours with straight edges, so that it does not depend on how a version of Pillow rounds."""
    picture = Image.new("RGB", size, "#3a6fd0")
    draw = ImageDraw.Draw(picture)
    width, height = size
    draw.rectangle((0, height // 2, width, height), fill="#3f8a2a")
    draw.rectangle((width // 2, height // 8, width // 2 + width // 8, height // 4), fill="#ffdc5a")
    picture.save(path)
    return path


async def _pictures(desk: Any, pilot: Pilot[Any], folder: Path) -> None:
    screen = desk.app.screen
    pilot.app.screen.query_one(Prompt).cursor_blink = False
    desk.daemon.capabilities += ["vision", "audio"]
    desk.daemon.publish()
    (folder / "memo.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt ")
    (folder / "notes.txt").write_text("seven apples")
    wide, tall = _landscape(folder / "wide.png", (640, 320)), _landscape(folder / "tall.png", (160, 320))
    for number, files in enumerate(([wide], [wide, tall, folder / "memo.wav"])):
        await screen.attach(files)
        await pilot.press(*("What is this?" if number == 0 else "And these?"), "enter")
        await desk.until(pilot, lambda number=number: len(desk.daemon.questions) == number + 1)
        desk.daemon.say("A hill below the sky.")
        desk.daemon.end_answer()
        await desk.until(pilot, lambda: not screen.view.is_answering)
    await screen.attach([tall, folder / "notes.txt", folder / "memo.wav"])
    await desk.see(pilot, "✕")
    await desk.until(
        pilot, lambda: all(not worker.is_running for worker in pilot.app.workers if worker.name == "pictures")
    )
    await pilot.pause()


@pytest.mark.parametrize("theme", ["localrun-dark", "localrun-light"])
@pytest.mark.parametrize("size", SIZES)
def test_pictures(desk: Any, snap_compare: Any, tmp_path: Path, size: str, theme: str) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        desk.app.theme = theme
        await _pictures(desk, pilot, tmp_path)

    assert snap_compare(desk.app, terminal_size=SIZES[size], run_before=before)
