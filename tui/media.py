"""The pictures and sounds of the chats: what is known of one, and the folder that keeps their files.

A message's `extra` has a list `media` of what is known; the bytes are in a file named by their SHA-256, once however
often they are sent, so that a chat with hundreds of megabytes of photos opens as fast as one without. A file that no
message names is removed when the history is opened, a day after it was last used: until then a deleted chat can be
brought back, and an answer that has not begun can still begin.

Owner: the folder belongs to all windows that share the history. `put` and `get` may be called in any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from localrun import stored
from localrun.attachments import Attachment, Kind
from localrun.sound_headers import seconds_of
from localrun.tui import pictures

UNUSED_FILES_STAY_S = 86_400.0


class Medium(msgspec.Struct, frozen=True):
    """A picture or a sound. `width` and `height` are pixels, `seconds` the length; 0 for what is not known."""

    sha256: str
    name: str
    kind: Kind
    size_bytes: int
    width: int = 0
    height: int = 0
    seconds: float = 0.0


class AttachedFile(NamedTuple):
    """A file that goes with a question; `medium` is None for a text."""

    file: Attachment
    medium: Medium | None


def examined(file: Attachment) -> AttachedFile:
    """What there is to know of a file. Reads its header only, but all of its bytes for the SHA-256."""
    if file.kind is Kind.TEXT:
        return AttachedFile(file, None)
    width, height = pictures.size_of(file.data) if file.kind is Kind.PICTURE else (0, 0)
    seconds = seconds_of(file.data) if file.kind is Kind.SOUND else 0.0
    sha256 = hashlib.sha256(file.data).hexdigest()
    return AttachedFile(file, Medium(sha256, file.name, file.kind, len(file.data), width, height, seconds))


def media_of(extra: dict[str, Any]) -> tuple[Medium, ...]:
    """Those of a message; one that cannot be read in a damaged history is left out."""
    found = []
    listed = extra.get("media")
    for given in listed if isinstance(listed, list) else []:
        with contextlib.suppress(msgspec.ValidationError):
            found.append(msgspec.convert(given, Medium))
    return tuple(found)


def extra_of(media: Collection[Medium]) -> dict[str, Any]:
    """What `media_of` reads."""
    return {"media": msgspec.to_builtins(list(media))} if media else {}


class MediaFiles:
    """See the module. Without a folder, and what a full disk refuses, is kept in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._in_memory: dict[str, bytes] = {}

    def put(self, data: bytes) -> None:
        """Keeps a file. Raises OSError when it is in memory only, and lost with this window."""
        sha256 = hashlib.sha256(data).hexdigest()
        if self._folder is None:
            self._in_memory[sha256] = data
            return
        path = self._folder / sha256
        try:
            if path.exists():
                os.utime(path)
            else:
                stored.replace(path, data)
        except OSError:
            self._in_memory[sha256] = data
            raise

    def get(self, sha256: str) -> bytes | None:
        """The bytes of a file; None when it is gone, or is not what it was."""
        if sha256 in self._in_memory or self._folder is None:
            return self._in_memory.get(sha256)
        try:
            data = (self._folder / sha256).read_bytes() if sha256.isalnum() else b""
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def use(self, media: Collection[Medium]) -> None:
        """Counts as a use of these files."""
        for medium in media:
            if self._folder is not None and medium.sha256.isalnum():
                with contextlib.suppress(OSError):
                    os.utime(self._folder / medium.sha256)

    def collect(self, used: Callable[[], Collection[str]]) -> None:
        """Removes files that no message names and that nobody used for a day. `used` are asked for if there are any."""
        if self._folder is None or not self._folder.is_dir():
            return
        named = used()
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name not in named and time.time() - path.stat().st_mtime > UNUSED_FILES_STAY_S:
                    path.unlink()
