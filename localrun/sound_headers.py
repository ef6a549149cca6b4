"""The headers of sound files: their format, rate and length, by a look at a few bytes.

The daemon checks what clients send by them, and the TUI shows how long a sound is. Pure, and written for hostile files:
every read is within the bytes, and every loop goes forward. MP3 says nothing about its length, or nothing that can be
relied on, and OGG only at its end: there the daemon's worker counts while it decodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

# What a WAVE file may hold: whole numbers, floating-point ones, and the two logarithmic codes of telephones.
_PCM, _FLOAT, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
# Programs that write into a pipe do not know the length beforehand, and put in the largest.
_UNKNOWN_BYTES = 0x7FFF_F000
_MAX_CHUNKS = 1000
_TAIL_BYTES = 65_536

# By version (2.5, none, 2, 1) and index.
_MP3_RATES = ((11025, 12000, 8000), (0, 0, 0), (22050, 24000, 16000), (44100, 48000, 32000))
# Of version 1, and of the others.
_MP3_KBITS = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)


class UnknownCodecError(Exception):
    """A codec that is not decoded here; its name is the message."""


class SoundHeader(NamedTuple):
    """`n_samples` of each channel, None where the header does not say. `data_at` is where those of a WAV begin."""

    rate_hz: int
    n_samples: int | None
    data_at: int = 0


def _wave(data: bytes) -> SoundHeader:
    at, rate_hz, frame_bytes = 12, 0, 0
    for _ in range(_MAX_CHUNKS):
        name = data[at : at + 4]
        (length,) = struct.unpack_from("<I", data, at + 4)
        at += 8
        if name == b"fmt ":
            code, _, rate_hz, _, frame_bytes, _ = struct.unpack_from("<HHIIHH", data, at)
            if code == _EXTENSIBLE:
                (code,) = struct.unpack_from("<H", data, at + 24)
            if code not in (_PCM, _FLOAT, _A_LAW, _MU_LAW):
                raise UnknownCodecError(f"WAV with codec {code:#06x}")
        elif name == b"data":
            if not frame_bytes:
                raise ValueError
            left = len(data) - at
            is_open = length >= _UNKNOWN_BYTES or (length == 0 and left > 0)
            if length > left and not is_open:
                raise ValueError
            return SoundHeader(rate_hz, (left if is_open else length) // frame_bytes, at)
        at += length + length % 2
    raise ValueError


def _flac(data: bytes) -> SoundHeader:
    if data[4] & 0x7F != 0:  # the first block is STREAMINFO
        raise ValueError
    (packed,) = struct.unpack_from(">Q", data, 18)
    return SoundHeader(packed >> 44, (packed & 0xF_FFFF_FFFF) or None)


def _mp3(data: bytes) -> SoundHeader:
    start = _mp3_start(data)
    return SoundHeader(_MP3_RATES[data[start + 1] >> 3 & 3][data[start + 2] >> 2 & 3], None)


def _mp3_start(data: bytes) -> int:
    """Where the first frame is."""
    at = 0
    if data[:3] == b"ID3":
        tag = data[6:10]
        at = 10 + (tag[0] << 21 | tag[1] << 14 | tag[2] << 7 | tag[3]) if max(tag) < 0x80 else 10
    for start in range(at, min(at + 8192, len(data) - 3)):
        if is_mp3_frame(data[start : start + 4]):
            return start
    raise ValueError


def is_mp3_frame(head: bytes) -> bool:
    """Whether these four bytes begin a frame of MPEG audio, layer III."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer, bitrate, rate = head[1] >> 3 & 3, head[1] >> 1 & 3, head[2] >> 4, head[2] >> 2 & 3
    return version != 1 and layer == 1 and bitrate not in (0, 15) and rate != 3


def _ogg(data: bytes) -> SoundHeader:
    at = 27 + data[26]
    if data[at : at + 7] == b"\x01vorbis":
        (rate_hz,) = struct.unpack_from("<I", data, at + 12)
    elif data[at : at + 8] == b"OpusHead":
        rate_hz = 48000  # whatever was recorded, that is what it is decoded to
    elif data[at : at + 5] == b"\x7fFLAC":
        return SoundHeader(_flac(data[at + 9 :]).rate_hz, _last_granule(data))
    else:
        raise UnknownCodecError("OGG that is neither Vorbis, Opus nor FLAC")
    return SoundHeader(rate_hz, _last_granule(data))


def _last_granule(data: bytes) -> int | None:
    """How many samples there are up to the last page."""
    at = data.rfind(b"OggS", max(0, len(data) - _TAIL_BYTES))
    if at < 0 or at + 14 > len(data):
        return None
    (granule,) = struct.unpack_from("<q", data, at + 6)
    return int(granule) if granule > 0 else None


FORMATS: dict[str, Callable[[bytes], SoundHeader]] = {"WAV": _wave, "FLAC": _flac, "MP3": _mp3, "OGG": _ogg}


def header_of(kind: str, data: bytes) -> SoundHeader:
    """Of a file that begins as one of `FORMATS`. Raises ValueError for a broken header, and UnknownCodecError."""
    try:
        return FORMATS[kind](data)
    except (struct.error, IndexError, ValueError):
        raise ValueError(f"a broken {kind} header") from None


def seconds_of(data: bytes) -> float:
    """About how long a sound is; 0 where its header does not say. An MP3 without a count of its frames is taken to have
    the bit rate of its first one all through."""
    kind = next((name for magic, name in _MAGICS if data.startswith(magic)), "MP3")
    try:
        header = header_of(kind, data)
    except (ValueError, UnknownCodecError):
        return 0.0
    if kind == "MP3":
        return _mp3_seconds(data, header.rate_hz)
    return header.n_samples / header.rate_hz if header.n_samples and header.rate_hz else 0.0


_MAGICS = ((b"RIFF", "WAV"), (b"fLaC", "FLAC"), (b"OggS", "OGG"))


def _mp3_seconds(data: bytes, rate_hz: int) -> float:
    start = _mp3_start(data)
    is_version_1 = data[start + 1] >> 3 & 3 == 3
    for tag in (b"Xing", b"Info"):
        at = data.find(tag, start, start + 200)
        counted = data[at + 7 : at + 12]
        if at >= 0 and len(counted) == 5 and counted[0] & 1:
            return int.from_bytes(counted[1:], "big") * (1152 if is_version_1 else 576) / rate_hz
    return (len(data) - start) * 8 / (_MP3_KBITS[not is_version_1][data[start + 2] >> 4] * 1000)
