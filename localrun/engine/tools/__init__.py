"""Programs that measure or report, each a process of its own."""

from __future__ import annotations

import json
import os
from typing import TextIO


def own_stdout() -> TextIO:
    """Where a program's own lines go from now on. Native libraries and drivers print on stdout too; what they write
    there goes to stderr."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return lines


def say(lines: TextIO, **fields: object) -> None:
    """An object on a line of its own, which goes out at once."""
    lines.write(json.dumps(fields) + "\n")
