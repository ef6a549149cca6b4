"""What a file is, by its first bytes, and whether it is within the limits: before any decoder sees it.

Whatever a client says about a file (a type, a name) does not count. Formats that models' programs take elsewhere and
that are not decoded here are refused by their names, with the way out.

Pure, and written for hostile files: every read is within the bytes, and every loop goes forward. Only headers are
looked at; whether the rest is whole is found out by the worker that decodes it (`worker.py`, a process of its own).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from localrun import sound_headers
from localrun.errors import BadRequest
from localrun.sound_headers import UnknownCodecError, is_mp3_frame
from localrun.wire import MediaKind

MAX_PIXELS = 40_000_000
MAX_SIDE = 16_384
MAX_SOUND_S = 600
MIN_RATE_HZ, MAX_RATE_HZ = 8_000, 192_000
# A window of the encoders for speech; fewer made a native library abort.
MIN_SAMPLES = 400

PICTURES = "PNG, JPEG, GIF, BMP or WebP"
SOUNDS = "WAV, FLAC, OGG or MP3"
_WAYS_OUT = {MediaKind.IMAGE: f"send {PICTURES}", MediaKind.AUDIO: f"send {SOUNDS}"}
NAMES = {MediaKind.IMAGE: "a picture", MediaKind.AUDIO: "sound"}


class Header(NamedTuple):
    """`width` and `height` of a picture as it is stored, before it is turned; `rate_hz` and `n_samples` of sound,
    None where only decoding tells."""

    kind: MediaKind
    format: str
    width: int = 0
    height: int = 0
    rate_hz: int = 0
    n_samples: int | None = None


# (where, bytes, format) of what is decoded, and of what is refused by its name.
_KNOWN: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"BM", "BMP"),
    (8, b"WEBP", "WebP"),
    (8, b"WAVE", "WAV"),
    (0, b"fLaC", "FLAC"),
    (0, b"OggS", "OGG"),
    (0, b"ID3", "MP3"),
)
_OTHERS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"8BPS", "Photoshop (PSD)"),
    (0, b"%PDF", "PDF"),
    (4, b"ftypheic", "HEIC"),
    (4, b"ftypheix", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftypmsf1", "HEIC"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftypM4A", "M4A (AAC)"),
    (4, b"ftyp", "video (MP4 or MOV)"),
    (0, b"\x1aE\xdf\xa3", "video (Matroska or WebM)"),
    (8, b"AVI ", "video (AVI)"),
    (0, b"\0\0\x01\xba", "video (MPEG)"),
    (0, b"\0\0\x01\xb3", "video (MPEG)"),
    (0, b"FLV\x01", "video (Flash)"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "Windows Media"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\x01\0", "icon (ICO)"),
    (0, b"v/1\x01", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"),
    (0, b"qoif", "QOI"),
    (0, b"DDS ", "DDS"),
    (0, b"FORM", "AIFF"),
    (0, b"RF64", "RF64"),
    (0, b"#!AMR", "AMR"),
    (0, b"MThd", "MIDI"),
    (0, b"PK\x03\x04", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
)
_TEXTS = ((re.compile(rb"<svg[\s>]"), "SVG"), (re.compile(rb"<html[\s>]|<!doctype html"), "a web page"))
_NETPBM = re.compile(rb"P[1-7]\s")


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


_SIZES: dict[str, Callable[[bytes], tuple[int, int]]] = {
    "PNG": _png,
    "JPEG": _jpeg,
    "GIF": _gif,
    "BMP": _bmp,
    "WebP": _webp,
}


def look(data: bytes, field: str, wanted: MediaKind | None = None) -> Header:
    """What `data` is. Raises BadRequest naming `field` for what is no picture or sound, is not `wanted`, is broken or
    is beyond a limit."""
    if not data:
        raise BadRequest.of(field, f"an empty file; {_way_out(wanted)}")
    name = _format(data)
    kind = MediaKind.IMAGE if name in _SIZES else MediaKind.AUDIO
    if name not in _SIZES and name not in sound_headers.FORMATS:
        found = f"{name} is not supported" if name else f"not {NAMES[wanted] if wanted else 'a picture or sound'}"
        raise BadRequest.of(field, f"{found}; {_way_out(wanted)}")
    if wanted is not None and kind is not wanted:
        raise BadRequest.of(field, f"{name}, where {NAMES[wanted]} belongs; {_way_out(wanted)}")
    try:
        if kind is MediaKind.IMAGE:
            width, height = _SIZES[name](data)
            check_size(name, width, height, field)
            return Header(kind, name, width=width, height=height)
        return _sound(name, sound_headers.header_of(name, data), field)
    except (ValueError, IndexError, struct.error):
        raise BadRequest.of(field, f"a broken or truncated {name} file; send a whole one") from None
    except UnknownCodecError as error:
        raise BadRequest.of(field, f"{error} is not supported; {_way_out(kind)}") from None


def check_size(name: str, width: int, height: int, field: str) -> None:
    """Raises BadRequest."""
    if width < 1 or height < 1:
        raise BadRequest.of(field, f"{name} of {width} x {height} pixels, which is nothing; send a picture")
    if width > MAX_SIDE or height > MAX_SIDE or width * height > MAX_PIXELS:
        raise BadRequest.of(
            field,
            f"{name} of {width} x {height} pixels; the limit is {MAX_SIDE} a side and {MAX_PIXELS // 10**6} "
            f"million in all; send a smaller one",
        )


def _sound(name: str, header: sound_headers.SoundHeader, field: str) -> Header:
    check_rate(name, header.rate_hz, field)
    if header.n_samples is not None:
        check_length(name, header.n_samples, header.rate_hz, field)
    return Header(MediaKind.AUDIO, name, rate_hz=header.rate_hz, n_samples=header.n_samples)


def check_rate(name: str, rate_hz: int, field: str) -> None:
    """Raises BadRequest."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise BadRequest.of(
            field,
            f"{name} of {rate_hz} samples a second; the limits are {MIN_RATE_HZ} and {MAX_RATE_HZ}; send it "
            f"resampled, for example to 16000",
        )


def check_length(name: str, n_samples: int, rate_hz: int, field: str) -> None:
    """Raises BadRequest."""
    if n_samples < MIN_SAMPLES:
        raise BadRequest.of(
            field, f"{name} of {n_samples} samples; at least {MIN_SAMPLES} are needed; send a longer recording"
        )
    if n_samples > MAX_SOUND_S * rate_hz:
        raise BadRequest.of(
            field, f"{name} of {n_samples / rate_hz:.0f} s; the limit is {MAX_SOUND_S} s; send it in parts"
        )


def _way_out(wanted: MediaKind | None) -> str:
    return _WAYS_OUT[wanted] if wanted is not None else f"send {PICTURES}, or {SOUNDS}"


def _format(data: bytes) -> str:
    for at, magic, name in (*_KNOWN, *_OTHERS):
        if data.startswith(magic, at) and (at != 8 or data.startswith(b"RIFF")):
            return name
    if is_mp3_frame(data[:4]):
        return "MP3"
    if data[0] == 0xFF and len(data) > 1 and data[1] & 0xF6 == 0xF0:
        return "AAC"
    if _NETPBM.match(data):
        return "Netpbm"
    head = data[:1024].lower()
    return next((name for pattern, name in _TEXTS if pattern.search(head)), "")
