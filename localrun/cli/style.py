"""Colours by meaning, on a terminal alone: NO_COLOR, TERM=dumb, pipes and files turn them off."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import TextIO


class Look(StrEnum):
    """What a text is, as the terminal's number for how it looks."""

    TABLE_HEAD = "1"
    HEADING = "2"
    BAD = "31"
    GOOD = "32"
    DOUBTFUL = "33"


def painted(text: str, look: Look, stream: TextIO | None = None) -> str:
    """The text for this stream, else for stdout."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain or not (stream or sys.stdout).isatty() else f"\x1b[{look}m{text}\x1b[0m"
