"""What the user calls a model, as the daemon can find it.

Does not: check that the model exists; the daemon does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# owner/repo:file.gguf, perhaps after the hub's host: a file of a repository, not one of this machine.
_FILE_OF_A_REPO = re.compile(
    r"(https://)?([\w.-]+/)?[\w-][\w.-]*/[\w-][\w.@-]*:[\w.-]+\.gguf", re.ASCII | re.IGNORECASE
)


def for_daemon(name: str) -> str:
    """The name, or the absolute path for a file: the daemon does not share the user's working folder.

    A file is what ends in `.gguf`, starts like a path, or has a separator and exists.
    """
    if _FILE_OF_A_REPO.fullmatch(name) and not name.startswith(".") and not Path(name).exists():
        return name
    starts_like_a_path = name.startswith(("./", "../", "~", os.sep, "." + os.sep, ".." + os.sep))
    has_separator = "/" in name or os.sep in name
    if name.endswith(".gguf") or starts_like_a_path or (has_separator and Path(name).is_file()):
        return str(Path(name).expanduser().absolute())
    return name
