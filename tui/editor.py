"""A text written in the person's own editor: $VISUAL, else $EDITOR, else `vi` (`notepad` on Windows).

Blocks until the editor ends; the terminal must be free for it. Raises OSError when there is no such program, and
subprocess.CalledProcessError when it failed: the text is then as it was.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


def edited(text: str, folder: Path) -> str:
    """What the editor leaves of `text`, without white space at the end. `folder` is for the file."""
    file = folder / "prompt.md"
    file.write_text(text, encoding="utf-8")
    usual = "notepad" if sys.platform == "win32" else "vi"
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or usual
    subprocess.run([*shlex.split(command), str(file)], check=True)
    return file.read_text(encoding="utf-8").rstrip()
