"""The journal of an unfinished download: which ranges of the partial file hold what the server sent.

A text file of lines, each with its own checksum, only ever appended to:

    H <JSON of Header> <crc>                      first line
    R <start> <end> <crc of the content> <crc>    a range was written
    S <crc>                                       the content of every record above has reached the disk

A killed process leaves at most one torn last line, which is not read. A power cut may leave records of content that
never reached the disk: therefore whoever resumes compares the CRC-32 of the records behind the last S with the content
(`partial.Partial`). So records need not wait for the disk, and a range is believed only if it is really there.

Does not: guard against tampering; that is what the digest at the end is for.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from localrun.errors import DownloadFailed


class Range(NamedTuple):
    """Bytes `start` to `end`, without the one at `end`."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class RangeSet:
    """Ranges that touch or overlap become one."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.n_bytes = 0
        for each in ranges:
            self.add(each)

    def __iter__(self) -> Iterator[Range]:
        return map(Range, self._starts, self._ends)

    def add(self, added: Range) -> None:
        """Raises ValueError for a range that begins before 0 or ends before it begins."""
        start, end = added
        if not 0 <= start <= end:
            raise ValueError(f"{start} to {end} is no range")
        if start == end:
            return
        # Those that end before `start` stay as they are, and those that begin after `end`.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        replaced = sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        self.n_bytes += end - start - replaced

    def missing(self, within: Range) -> list[Range]:
        """The parts of `within` that are not there, in order."""
        gaps = []
        position = within.start
        for start, end in self:
            if end <= position:
                continue
            if start >= within.end:
                break
            if start > position:
                gaps.append(Range(position, start))
            position = end
        if position < within.end:
            gaps.append(Range(position, within.end))
        return gaps


def split(ranges: Iterable[Range], part_bytes: int) -> list[Range]:
    """The ranges in pieces of at most `part_bytes`, in order."""
    return [
        Range(start, min(start + part_bytes, end))
        for whole_start, end in ranges
        for start in range(whole_start, end, part_bytes)
    ]


_VERSION = 1
_SYNCED = b"S"
# More than the journal of a terabyte in ranges of one mebibyte.
_MAX_BYTES = 256 * 1024 * 1024


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the partial file is going to be. A journal of anything else is not gone on with.

    `validator` is the strong ETag of the content, "" if the server gave none.
    """

    size_bytes: int
    sha256: str = ""
    git_sha1: str = ""
    validator: str = ""
    version: int = _VERSION


class Record(NamedTuple):
    range: Range
    crc32: int


class JournalContents(NamedTuple):
    """The first `n_synced` records are certain. `n_sound_bytes` is where appending may go on: the last line's end."""

    header: Header
    records: list[Record]
    n_synced: int
    n_sound_bytes: int


def read(path: Path) -> JournalContents | None:
    """What a journal says up to its first unsound line; None if there is no journal with a sound header.

    Raises DownloadFailed for the journal of a newer localrun: what it knows of the content stays for that."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    header: Header | None = None
    records: list[Record] = []
    n_synced = n_sound_bytes = 0
    for line in content.splitlines(keepends=True):
        fields = _unsealed(line)
        if fields is None:
            break
        if header is None:
            header = _header(fields)
            if header is None:
                return None
            if header.version > _VERSION:
                raise DownloadFailed(
                    f"{path} belongs to a download that a newer localrun began; upgrade localrun and pull again, or "
                    f"delete that file to begin anew"
                )
        elif fields == _SYNCED:
            n_synced = len(records)
        else:
            record = _record(fields, header.size_bytes)
            if record is None:
                break
            records.append(record)
        n_sound_bytes += len(line)
    return None if header is None else JournalContents(header, records, n_synced, n_sound_bytes)


class Journal:
    """An open journal, to append to. Used by one thread at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @classmethod
    def create(cls, path: Path, header: Header) -> Journal:
        """A new journal in the place of any old one, on the disk when this returns."""
        journal = cls(path.open("wb"))
        try:
            journal._file.write(_sealed(b"H " + msgspec.json.encode(header)))
            journal._sync()
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def reopen(cls, path: Path, n_sound_bytes: int) -> Journal:
        """Goes on after the last sound line; what stands behind it is cut off."""
        file = path.open("r+b")
        file.truncate(n_sound_bytes)
        file.seek(n_sound_bytes)
        return cls(file)

    def append(self, record: Record) -> None:
        """Survives a kill of this process when it returns, and a power cut after `content_reached_the_disk`."""
        start, end = record.range
        self._file.write(_sealed(b"R %d %d %08x" % (start, end, record.crc32)))
        self._file.flush()

    def content_reached_the_disk(self) -> None:
        """To be called after the content of every appended record was flushed to the disk; the journal is, here."""
        self._file.write(_sealed(_SYNCED))
        self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """What the disk refused to take is lost, and the file closed all the same."""
        with contextlib.suppress(OSError):
            self._file.close()


def _sealed(line: bytes) -> bytes:
    return b"%s %08x\n" % (line, zlib.crc32(line))


def _unsealed(line: bytes) -> bytes | None:
    if not line.endswith(b"\n"):
        return None
    text, _, crc = line[:-1].rpartition(b" ")
    return text if crc == b"%08x" % zlib.crc32(text) else None


def _header(text: bytes) -> Header | None:
    try:
        header = msgspec.json.decode(text.removeprefix(b"H "), type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return header if header.version >= _VERSION and header.size_bytes >= 0 else None


def _record(text: bytes, size_bytes: int) -> Record | None:
    try:
        kind, start, end, crc = text.split(b" ")
        record = Record(Range(int(start), int(end)), int(crc, 16))
    except ValueError:
        return None
    return record if kind == b"R" and 0 <= record.range.start < record.range.end <= size_bytes else None
