"""Sequential reads from a file that nobody has vouched for, each checked against what is left of it.

Runs wherever a model file is inspected, one reader per open file. Invariant: no number from the file decides how much
is allocated or skipped before it was compared with the bytes that remain. Every failure is a BadModelFile naming the
file. Files are never mapped: one that shrinks under a mapping kills the process that touches it.

Does not: know the format.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from localrun.errors import BadModelFile
from localrun.stored import open_regular

# The largest headers known have about 20 MB, nearly all of it vocabulary.
MAX_HEADER_BYTES: Final = 128 * 1024 * 1024

_CHUNK_BYTES = 256 * 1024
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class BoundedReader:
    """`position` is the next unread byte. Nothing beyond `limit_bytes` is read."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int, limit_bytes: int = MAX_HEADER_BYTES) -> None:
        self.position = 0
        self.size_bytes = size_bytes
        self._path = path
        self._file = file
        self._limit = min(self.size_bytes, limit_bytes)

    def u32(self, what: str) -> int:
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def take(self, n_bytes: int, what: str) -> bytes:
        self._check_room(n_bytes, what)
        data = self._file.read(n_bytes)
        if len(data) < n_bytes:
            self.fail("became shorter while it was read")
        self.position += n_bytes
        return data

    def skip(self, n_bytes: int, what: str) -> None:
        self._check_room(n_bytes, what)
        self.seek(self.position + n_bytes, what)

    def seek(self, position: int, what: str) -> None:
        if position > self._limit:
            self.fail(f"is truncated: it ends before {what}")
        self._file.seek(position)
        self.position = position

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over `count` strings, each a 64-bit length and that many bytes.

        Works on chunks and with locals only: this loop sees every token and merge of every model that is listed.
        """
        unpack_length = _U64.unpack_from
        while count:
            chunk = self._file.read(min(_CHUNK_BYTES, self._limit - self.position))
            last_start = len(chunk) - _U64.size
            at = 0
            while count and at <= last_start:
                at += _U64.size + unpack_length(chunk, at)[0]
                count -= 1
            if at == 0:
                self._check_room(_U64.size, what)
                self.fail("became shorter while it was read")
            # The last string may reach beyond the chunk, and beyond the file.
            self.skip(at, what)

    def fail(self, problem: str) -> NoReturn:
        """Raises BadModelFile: the file's name, then `problem`."""
        raise BadModelFile(f"{self._path.name} {problem}")

    def _check_room(self, n_bytes: int, what: str) -> None:
        left = self._limit - self.position
        if n_bytes <= left:
            return
        if self._limit < self.size_bytes:
            self.fail(f"has a header of more than {self._limit} bytes (at {what})")
        self.fail(f"is truncated in {what}: it needs {n_bytes} bytes more and {left} are left")


@contextmanager
def open_model_file(
    path: Path, limit_bytes: int = MAX_HEADER_BYTES, *, size_bytes: int | None = None
) -> Iterator[BoundedReader]:
    """A reader at the start of a regular file, or of what is here of one of `size_bytes`.

    Raises BadModelFile, also for what the operating system reports.
    """
    try:
        with open_regular(path) as file:
            yield BoundedReader(path, file, size_bytes or os.fstat(file.fileno()).st_size, limit_bytes)
    except OSError as error:
        raise BadModelFile(f"{path.name} cannot be read: {error.strerror or error}") from error
