"""The headers of picture files: their format and their size in pixels, by a look at a few bytes.

Pure, and written for hostile files: every read is within the bytes, and every loop goes forward. Only the header is
looked at; whether the rest is whole is found out by the worker that decodes it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

# Of JPEG: the markers that begin a frame (SOF), and those that have no length.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD8)))
_MARKER = re.compile(rb"\xff+([^\xff])", re.DOTALL)
_MAX_MARKERS = 4096


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _bmp(data: bytes) -> tuple[int, int]:
    (length,) = struct.unpack_from("<I", data, 14)
    if length == 12:  # OS/2's, with 16 bits for each side
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)  # a negative height means top down
    return width, abs(height)


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(_MAX_MARKERS):
        found = _MARKER.search(data, at)
        if found is None:
            raise ValueError
        marker, at = found[1][0], found.end()
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return width, height
        if marker in (0xD9, 0xDA):  # the picture itself, or its end, without a frame before
            raise ValueError
        if marker not in _ALONE:
            (length,) = struct.unpack_from(">H", data, at)
            at += max(2, length)
    raise ValueError


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise ValueError
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind != b"VP8 " or data[23:26] != b"\x9d\x01\x2a":
        raise ValueError
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


FORMATS: dict[str, Callable[[bytes], tuple[int, int]]] = {
    "PNG": _png,
    "JPEG": _jpeg,
    "GIF": _gif,
    "BMP": _bmp,
    "WebP": _webp,
}


def size_of(kind: str, data: bytes) -> tuple[int, int]:
    """Width and height of a file that begins as one of `FORMATS`. Raises ValueError for a broken header."""
    try:
        return FORMATS[kind](data)
    except (struct.error, IndexError, ValueError):
        raise ValueError(f"a broken {kind} header") from None
