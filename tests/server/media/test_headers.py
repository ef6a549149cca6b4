"""What a file is and how large, by its first bytes; and that no bytes make the reading of them fail otherwise."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from localrun.errors import BadRequest
from localrun.server.media.headers import look
from localrun.wire import MediaKind
from tests.depth import DEPTH
from tests.server.media import making

PICTURES = ("PNG", "JPEG", "GIF", "BMP", "WebP")


@pytest.mark.parametrize("name", PICTURES)
def test_the_size_of_a_picture(name: str) -> None:
    header = look(making.encoded(making.noise(31, 17), name), "f")
    assert header[:4] == (MediaKind.IMAGE, name, 31, 17)


def test_all_kinds_of_webp_and_bmp() -> None:
    picture = making.noise(31, 17)
    translucent = picture.convert("RGBA")
    translucent.putalpha(100)
    for made in (
        making.encoded(picture, "WebP", lossless=True),
        making.encoded(translucent, "WebP"),  # with VP8X
        making.encoded(picture.convert("1"), "BMP"),
        b"BM" + b"\0" * 12 + struct.pack("<IHHHH", 12, 31, 17, 1, 24),  # OS/2's
        b"BM" + b"\0" * 12 + struct.pack("<IiiHH", 40, 31, -17, 1, 24),  # from top to bottom
    ):
        assert look(made, "f")[2:4] == (31, 17)


def test_a_jpeg_s_size_stands_behind_what_cameras_write_before() -> None:
    plain = making.encoded(making.noise(31, 17), "JPEG", progressive=True)
    thumbnail = b"\xff\xe1" + struct.pack(">H", 60002) + plain[:300].ljust(60000, b"\xff")
    assert look(plain[:2] + thumbnail + b"\xff\xff" + plain[2:], "f")[2:4] == (31, 17)


@pytest.mark.parametrize(
    ("name", "subtype", "told"),
    [
        ("WAV", None, (48000, 48000)), ("WAV", "FLOAT", (48000, 48000)), ("WAV", "ULAW", (48000, 48000)),
        ("WAVEX", "PCM_24", (48000, 48000)), ("FLAC", None, (48000, 48000)), ("OGG", "VORBIS", (48000, 48000)),
        ("OGG", "OPUS", (48000, 48312)), ("MP3", None, (48000, None)),
    ],
)  # fmt: skip
def test_the_rate_and_length_of_sound(name: str, subtype: str | None, told: tuple[int, int | None]) -> None:
    header = look(making.sound(name, subtype=subtype), "f")
    assert (header.kind, header.rate_hz, header.n_samples) == (MediaKind.AUDIO, *told)


@pytest.mark.parametrize("n_bytes", [0, 0xFFFF_FFFF, 0x7FFF_FFFF])
def test_a_recording_that_was_written_into_a_pipe_goes_to_its_end(n_bytes: int) -> None:
    assert look(making.wave(making.tone(1000), n_bytes=n_bytes), "f").n_samples == 1000


REFUSED: list[tuple[bytes, str]] = [
    (b"", "an empty file"),
    (b"hello", "not a picture or sound"),
    (b"II*\0" + b"\0" * 20, "TIFF is not supported; send PNG, JPEG, GIF, BMP or WebP, or WAV, FLAC, OGG or MP3"),
    (b'<?xml version="1.0"?><svg xmlns="x">', "SVG is not supported"),
    (b"<!DOCTYPE html><html>", "a web page is not supported"),
    (b"\0\0\0\x18ftypheic", "HEIC is not supported"),
    (b"\0\0\0\x18ftypavif", "AVIF is not supported"),
    (b"8BPS\0\1", r"Photoshop \(PSD\) is not supported"),
    (b"\0\0\0\x20ftypisom", "video .MP4 or MOV. is not supported"),
    (b"\x1aE\xdf\xa3", "video .Matroska or WebM. is not supported"),
    (b"%PDF-1.7", "PDF is not supported"),
    (b"P6 2 2 255\n", "Netpbm is not supported"),
    (b"\xff\xf1\x50\x80", "AAC is not supported"),
    (making.png()[:20], "broken or truncated PNG"),
    (making.png_header(0, 5), "PNG of 0 x 5 pixels, which is nothing"),
    (making.png_header(20000, 20000), "PNG of 20000 x 20000 pixels; the limit is 16384 a side and 40 million in all"),
    (making.png_header(16385, 1), "16385 x 1 pixels"),
    (making.png_header(8000, 5001), "8000 x 5001 pixels"),
    (making.gif_header(65535, 65535), "65535 x 65535 pixels"),
    (making.webp_header(1 << 24, 1 << 24), "16777216 x 16777216 pixels"),
    (b"\xff\xd8\xff\xe0\0\x04ab\xff\xda", "broken or truncated JPEG"),
    (b"\xff\xd8" + b"\xff\0" * 100_000, "broken or truncated JPEG"),
    (making.wave(b"\0\0"), "WAV of 1 samples; at least 400 are needed"),
    (making.wave(making.tone(), rate_hz=1), "WAV of 1 samples a second; the limits are 8000 and 192000"),
    (making.wave(making.tone(), n_bytes=1 << 30), "broken or truncated WAV"),
    (making.wave(making.tone(), code=2), "WAV with codec 0x0002 is not supported; send WAV, FLAC, OGG or MP3"),
    (making.wave(b"\0" * 16000 * 601, bits=8), "WAV of 601 s; the limit is 600 s; send it in parts"),
    (b"RIFF\0\0\0\0WAVE" + b"junk\xff\xff\xff\xff" * 3, "broken or truncated WAV"),
    (b"OggS" + b"\0" * 22 + b"\x01\x07Speex   ", "OGG that is neither Vorbis, Opus nor FLAC"),
    (b"ID3\4\0\0\x7f\x7f\x7f\x7f", "broken or truncated MP3"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "said"), REFUSED, ids=[said[:30] for _, said in REFUSED])
def test_what_is_refused_and_why(data: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        look(data, "images[3]")
    assert caught.value.field == "images[3]"
    assert caught.value.message.startswith("images[3]: ")


def test_the_largest_are_accepted() -> None:
    assert look(making.png_header(16384, 2441), "f").width == 16384
    assert look(making.wave(b"\0" * 16000 * 600, bits=8), "f").n_samples == 16000 * 600
    assert look(making.wave(making.tone(400)), "f").n_samples == 400


def test_what_belongs_there_is_said() -> None:
    with pytest.raises(BadRequest, match="WAV, where a picture belongs; send PNG"):
        look(making.wave(making.tone()), "f", MediaKind.IMAGE)
    with pytest.raises(BadRequest, match="PNG, where sound belongs; send WAV"):
        look(making.png(), "f", MediaKind.AUDIO)


SEEDS = [
    *(making.encoded(making.noise(9, 9), name) for name in PICTURES), making.webp_header(9, 9),
    making.encoded(Image.new("RGB", (9, 9)), "WebP", lossless=True), making.wave(making.tone(500)),
    *(making.sound(name, seconds=0.1) for name in ("FLAC", "OGG", "MP3")),
]  # fmt: skip


@settings(max_examples=300 * DEPTH)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255))), st.integers(0, 4000))
def test_any_bytes_are_told_or_refused(data: bytes, changes: list[tuple[int, int]], n_bytes: int) -> None:
    made = bytearray(data)
    for at, value in changes:
        if at < len(made):
            made[at] = value
    with contextlib.suppress(BadRequest):
        look(bytes(made[:n_bytes]), "f")
