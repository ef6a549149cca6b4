"""The table of a room's README that lists the files on a path, and how it names them."""

from __future__ import annotations

import re
from pathlib import Path


def listed(room: Path, heading: str) -> list[str]:
    """The files in the table of that section, in its order."""
    section = (room / "README.md").read_text(encoding="utf-8").partition(f"## {heading}")[2]
    return re.findall(r"^\| `([\w/]+\.py)`", section.partition("\n## ")[0], re.MULTILINE)


def name_of(path: str, room: Path) -> str | None:
    """As that README has it: from the room, or from the folder that the room is in; None for what is in neither."""
    folder = next((folder for folder in (room, room.parent) if Path(path).is_relative_to(folder)), None)
    return None if folder is None else Path(path).relative_to(folder).as_posix()
