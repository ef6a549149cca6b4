"""Files that service managers read, and the log that they do not keep.

Does not: know what is in them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

FOLLOW_EVERY_S = 0.5


def write_private(path: Path, content: bytes) -> None:
    """Puts a file there that only the user can read, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove(path: Path) -> bool:
    """False when there was none. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def show_tail(path: Path, *, n_lines: int, follow: bool) -> int:
    """Prints the last lines of a log, and with `follow` those that come, until Ctrl-C. 1 when there is no log."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        print(f"there is no log yet; it will be {path}")
        return 1
    with file:
        print("".join(deque(file, maxlen=n_lines)), end="", flush=True)
        while follow:
            text = file.read()
            if text:
                print(text, end="", flush=True)
            time.sleep(FOLLOW_EVERY_S)
    return 0
