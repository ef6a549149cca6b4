"""What tells that a file is not the one that it was: of everything that an engine opens (loaded models, saved prefixes,
the digests that clients see), and of the headers and names that are remembered.

Does not: read a file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileStamp(NamedTuple):
    """Of what a path leads to. The change time also tells an edit in place whose modification time was put back."""

    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Raises OSError where there is nothing."""
        status = os.stat(path)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @classmethod
    def found(cls, path: Path) -> FileStamp | None:
        """None where there is nothing."""
        try:
            return cls.of(path)
        except OSError:
            return None
