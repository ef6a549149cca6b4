"""The length of a sound by its header."""

from __future__ import annotations

import io
import struct
import wave

import pytest

from localrun.sound_headers import seconds_of


def _wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\0" * 8000 * 4 * 3)
    return file.getvalue()


STREAMED = _wav()[:40] + b"\xff\xff\xff\xff" + _wav()[44:]
FLAC = b"fLaC\0\0\0\x22" + b"\0" * 10 + ((44_100 << 44) | 44_100 * 7).to_bytes(8, "big") + b"\0" * 16
VORBIS = b"OggS\0\2" + b"\0" * 21 + b"\x01vorbis\0\0\0\0\1" + struct.pack("<I", 48_000)
OGG_END = b"OggS\0\4" + struct.pack("<q", 48_000 * 5 + 312)
OPUS = b"OggS\0\2" + b"\0" * 21 + b"OpusHead\1\2" + struct.pack("<HI", 312, 16_000)
FRAME = b"\xff\xfb\x90\x00"  # MPEG 1, layer III, 128 kbit/s, 44.1 kHz
TAGGED = b"ID3\4\0\0\0\0\0\x0a" + b"\0" * 10


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (_wav(), 3.0),
        (STREAMED, 3.0),
        (FLAC, 7.0),
        (VORBIS + OGG_END, 5.0065),
        (OPUS + OGG_END, 5.0065),
        (FRAME + b"\0" * (16_000 * 2 - 4), 2.0),
        (TAGGED + FRAME + b"\0" * (16_000 * 2 - 4), 2.0),
        (FRAME + b"\0" * 32 + b"Xing\0\0\0\1" + struct.pack(">I", 3829) + b"\0" * 40, 100.02),
        # Nothing is known of what is cut off or damaged.
        (b"RIFF\0\0\0\0WAVE", 0.0),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\1", 0.0),
        (b"fLaC", 0.0),
        (b"OggS", 0.0),
        (b"OggS\0\2" + b"\xff" * 40, 0.0),
        (b"\xff\xfb", 0.0),
        (b"\xff\xfb\x00\x00", 0.0),
        (b"ID3\4\0\0\x7f\x7f\x7f\x7f", 0.0),
    ],
)
def test_length(data: bytes, seconds: float):
    assert seconds_of(data) == pytest.approx(seconds, rel=1e-3)
