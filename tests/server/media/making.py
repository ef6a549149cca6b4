"""Pictures, recordings and broken ones, for tests."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy
from PIL import Image


def encoded(image: Image.Image, name: str, **options: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, name, **options)
    return made.getvalue()


def noise(width: int = 30, height: int = 20) -> Image.Image:
    """The same for the same size."""
    values = numpy.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def png(width: int = 30, height: int = 20) -> bytes:
    return encoded(noise(width, height), "PNG")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_header(width: int, height: int, *, data: bytes = b"") -> bytes:
    """A PNG that says it is that large, whatever it holds."""
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return start + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def gif_header(width: int, height: int, frame: tuple[int, int] | None = None) -> bytes:
    """A GIF of a few bytes, whose first frame has a size of its own."""
    frame_width, frame_height = frame or (width, height)
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return screen + b"," + struct.pack("<HHHHB", 0, 0, frame_width, frame_height, 0) + b"\x02\x02\x44\x01\0;"


def webp_header(width: int, height: int) -> bytes:
    """An animated WebP (VP8X) that says it is that large, and has one frame of a pixel."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    extended = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + sizes
    animation = b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
    inner = encoded(Image.new("RGB", (1, 1)), "WebP", lossless=True)[12:]
    frame = b"\0" * 12 + b"\x0a\0\0\0" + inner
    body = b"WEBP" + extended + animation + b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def wave(
    samples: bytes,
    *,
    rate_hz: int = 16000,
    n_channels: int = 1,
    bits: int = 16,
    code: int = 1,
    n_bytes: int | None = None,
) -> bytes:
    """`n_bytes` is what the header says of the samples, whatever there are."""
    frame_bytes = n_channels * bits // 8
    told = struct.pack("<IHHIIHH", 16, code, n_channels, rate_hz, rate_hz * frame_bytes, frame_bytes, bits)
    n_bytes = len(samples) if n_bytes is None else n_bytes
    return b"RIFF" + struct.pack("<I", 36 + len(samples)) + b"WAVEfmt " + told + b"data" + struct.pack(
        "<I", n_bytes
    ) + samples  # fmt: skip


def tone(n_samples: int = 16000) -> bytes:
    """16 bits, of every value."""
    return (numpy.arange(n_samples) * 37 % 65536 - 32768).astype("<i2").tobytes()


def sound(name: str, *, rate_hz: int = 48000, subtype: str | None = None, seconds: float = 1.0) -> bytes:
    """A tone of 440 Hz in one of libsndfile's formats."""
    import soundfile

    made = io.BytesIO()
    values = numpy.sin(numpy.arange(int(rate_hz * seconds)) * 2 * numpy.pi * 440 / rate_hz) / 2
    soundfile.write(made, values.astype(numpy.float32), rate_hz, format=name, subtype=subtype)
    return made.getvalue()
