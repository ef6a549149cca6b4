"""The digest of a finished file, computed in a thread that can be told to stop. Pure but for the file that it reads."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

_CHUNK_BYTES = 1024 * 1024


class Stopped(Exception):
    """The caller does not want the digest any more."""


def sha256(path: Path, stop: threading.Event) -> str:
    """64 hex digits. Raises OSError, and Stopped soon after `stop` is set."""
    return _digest(hashlib.sha256(), path, stop)


def git_sha1(path: Path, stop: threading.Event) -> str:
    """40 hex digits: git's id of a blob with this content (sha1 over "blob <size>", NUL, content). Raises as above."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    return _digest(digest, path, stop)


def _digest(digest: hashlib._Hash, path: Path, stop: threading.Event) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if stop.is_set():
                raise Stopped
            digest.update(chunk)
    return digest.hexdigest()
