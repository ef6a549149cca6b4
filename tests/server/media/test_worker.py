"""What the worker makes of pictures and sound: exact pixels and samples, or a refusal that says why."""

from __future__ import annotations

import hashlib
import io
import struct
import subprocess
import sys
from typing import Any

import numpy
import pytest
from PIL import Image

from localrun.server.media import headers, worker
from localrun.wire import DecodeReply, DecodeRequest
from tests.server.media import making


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", headers.MAX_PIXELS)


def decoded(data: bytes, **changes: Any) -> tuple[DecodeReply, bytes]:
    header = headers.look(data, "f")
    asked = {"kind": header.kind, "format": header.format, "size_bytes": len(data), "cpu_s": 1, "audio_rate_hz": 16000}
    output = io.BytesIO(b"what was there before" * 1000)
    reply = worker.answer(DecodeRequest(**asked | changes), data, output)
    return reply, output.getvalue()


def pixels(data: bytes, **changes: Any) -> Any:
    reply, made = decoded(data, **changes)
    assert reply.error_code is None, reply.error_message
    assert reply.digest == hashlib.sha256(made + f"image {reply.width} {reply.height}".encode()).digest()
    return numpy.frombuffer(made, numpy.uint8).reshape(reply.height, reply.width, 3)


def samples(data: bytes) -> Any:
    reply, made = decoded(data)
    assert reply.error_code is None, reply.error_message
    assert reply.digest == hashlib.sha256(made + f"audio {reply.n_samples}".encode()).digest()
    values = numpy.frombuffer(made, "<f4")
    assert len(values) == reply.n_samples
    return values


def refused(data: bytes, **changes: Any) -> str:
    reply, _ = decoded(data, **changes)
    assert reply.error_code == "bad_request"
    return reply.error_message


def test_sound_without_the_resampler_is_taken_at_the_models_rate_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows on Arm, for which there is no package of it."""
    monkeypatch.setattr(worker, "soxr", None)
    assert len(samples(making.sound("WAV", rate_hz=16_000))) == 16_000
    assert "16000" in refused(making.sound("WAV", rate_hz=48_000))
    assert "soxr" in refused(making.sound("WAV", rate_hz=48_000))


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [("PNG", {}), ("BMP", {}), ("WebP", {"lossless": True})])
def test_what_loses_nothing_has_the_same_pixels(name: str, options: dict[str, Any]) -> None:
    picture = making.noise(70, 50)
    assert (pixels(making.encoded(picture, name, **options)) == numpy.asarray(picture)).all()


@pytest.mark.parametrize("name", ["JPEG", "WebP", "GIF"])
def test_others_are_close_to_it(name: str) -> None:
    flat = Image.new("RGB", (70, 50), (200, 100, 50))
    assert (abs(pixels(making.encoded(flat, name)).astype(int) - (200, 100, 50)) < 4).all()


def test_large_pictures_are_written_in_strips() -> None:
    picture = making.noise(3000, 1100)
    assert (pixels(making.encoded(picture, "BMP")) == numpy.asarray(picture)).all()


def test_what_is_transparent_lies_on_white() -> None:
    red = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert pixels(making.encoded(red, "PNG")).tolist() == [[[255, 255, 255]]]
    assert pixels(making.encoded(red, "WebP", lossless=True, exact=True)).tolist() == [[[255, 255, 255]]]
    red.putalpha(51)
    assert pixels(making.encoded(red, "PNG")).tolist() == [[[255, 204, 204]]]
    grey = Image.new("LA", (1, 1), (100, 51))
    assert pixels(making.encoded(grey, "PNG")).tolist() == [[[224, 224, 224]]]


def test_palettes_with_a_transparent_colour() -> None:
    picture = Image.new("P", (3, 1))
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    picture.putdata([0, 1, 2])
    wanted = [[[255, 0, 0], [255, 255, 255], [0, 0, 255]]]
    assert pixels(making.encoded(picture, "PNG", transparency=1)).tolist() == wanted
    assert pixels(making.encoded(picture, "GIF", transparency=1)).tolist() == wanted


def test_16_bits_become_their_upper_8() -> None:
    values = numpy.random.default_rng(1).integers(0, 65536, (20, 30), dtype=numpy.uint16)
    made = pixels(making.encoded(Image.fromarray(values), "PNG"))
    assert all((made[..., channel] == values >> 8).all() for channel in range(3))
    deep = b"\0" + bytes((0x12, 0x34, 0x56, 0x78, 0xFF, 0x80))
    header = making.chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    rest = making.png_header(1, 1, data=deep)[8 + 25 :]
    assert pixels(b"\x89PNG\r\n\x1a\n" + header + rest).tolist() == [[[0x12, 0x56, 0xFF]]]


def test_greys_bits_and_inks() -> None:
    assert pixels(making.encoded(Image.new("1", (2, 1), 1), "PNG")).tolist() == [[[255] * 3, [255] * 3]]
    assert pixels(making.encoded(Image.new("L", (1, 1), 77), "PNG")).tolist() == [[[77] * 3]]
    ink = pixels(making.encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert (abs(ink.astype(int) - (255, 0, 0)) < 4).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["PNG", "JPEG", "WebP"])
def test_a_picture_is_turned_as_its_camera_was(name: str, orientation: int) -> None:
    # Dark in its upper left quarter, as it is to be seen.
    seen = Image.new("L", (48, 32), 255)
    seen.paste(0, (0, 0, 24, 16))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)
    stored = seen if undo is None else seen.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x112] = orientation
    data = making.encoded(stored.convert("RGB"), name, exif=exif)
    header = headers.look(data, "f")
    assert (header.width, header.height) == ((32, 48) if orientation > 4 else (48, 32))
    made = pixels(data)
    assert made.shape == (32, 48, 3)
    assert made[4:12, 4:20].max() < 40
    assert made[20:, :].min() > 215
    assert made[:, 28:].min() > 215


def test_the_first_of_several_frames() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for name, options in (("GIF", {}), ("WebP", {"lossless": True}), ("PNG", {})):
        data = making.encoded(frames[0], name, save_all=True, append_images=frames[1:], **options)
        assert pixels(data)[0, 0].tolist() == [255, 0, 0], name


def test_little_detail_is_a_small_picture() -> None:
    assert pixels(making.png(1000, 400), max_side=512).shape == (205, 512, 3)
    assert pixels(making.png(100, 40), max_side=512).shape == (40, 100, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_leaves_the_picture() -> None:
    exif = b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 50
    data = making.encoded(making.noise(), "JPEG", exif=exif)
    assert pixels(data).shape == (20, 30, 3)


def test_what_is_cut_off_is_refused() -> None:
    for name in ("PNG", "JPEG", "GIF", "BMP", "WebP"):
        data = making.encoded(making.noise(90, 90), name)
        assert f"a broken or truncated {name} file" in refused(data[: len(data) // 2]), name


def test_a_frame_larger_than_its_header_says() -> None:
    assert "the limit is 16384 a side" in refused(making.gif_header(8, 8, frame=(65535, 600)))


# --- sound ------------------------------------------------------------------------------------------------------------


def test_16_bits_at_the_wanted_rate_are_exact() -> None:
    tone = making.tone(70_000)
    wanted = numpy.frombuffer(tone, "<i2") / numpy.float32(32768)
    assert (samples(making.wave(tone)) == wanted).all()
    twice = numpy.frombuffer(tone, "<i2").repeat(2).astype("<i2").tobytes()
    assert (samples(making.wave(twice, n_channels=2)) == wanted).all()


@pytest.mark.parametrize(
    ("name", "subtype"), [("WAV", None), ("FLAC", None), ("OGG", None), ("OGG", "OPUS"), ("MP3", None)]
)
@pytest.mark.parametrize("rate_hz", [8000, 24000, 48000])
def test_a_tone_keeps_its_height_and_length(name: str, subtype: str | None, rate_hz: int) -> None:
    made = samples(making.sound(name, subtype=subtype, rate_hz=rate_hz, seconds=2.5))
    assert abs(len(made) - 40_000) < 2500  # coders add silence
    strength = abs(numpy.fft.rfft(made[8000:24000]))
    assert strength.argmax() == 440
    assert 0.4 < abs(made[8000:24000]).max() < 0.6


@pytest.mark.parametrize("n_bytes", [0, 0xFFFF_FFFF, 0x7FFF_FFFF])
def test_a_recording_that_was_written_into_a_pipe_is_heard_to_its_end(n_bytes: int) -> None:
    tone = making.tone(1000)
    assert (samples(making.wave(tone, n_bytes=n_bytes)) == samples(making.wave(tone))).all()


def test_channels_are_mixed_and_too_loud_ones_cut() -> None:
    both = numpy.tile(numpy.array([[0.5, -0.25]], "<f4"), (1000, 1))
    assert (samples(making.wave(both.tobytes(), n_channels=2, bits=32, code=3)) == 0.125).all()
    loud = numpy.full(1000, 5e30, "<f4")
    assert (samples(making.wave(loud.tobytes(), bits=32, code=3)) == 1).all()


def test_sound_that_is_none() -> None:
    nothing = numpy.full(1000, numpy.nan, "<f4")
    assert "NaN" in refused(making.wave(nothing.tobytes(), bits=32, code=3))
    short = refused(making.wave(making.tone(401), rate_hz=192_000))
    assert short.startswith("WAV of 401 samples, which are 33 at the 16000 a second that the model takes; at least 400")
    for data in (making.png()[:33], making.encoded(Image.new("P", (9, 9)), "GIF")[:20]):
        assert "object at" not in refused(data), "what a library calls the file is nobody's name for it"
    assert "a broken or truncated FLAC" in refused(making.sound("FLAC")[:100].ljust(200, b"\0"))
    vorbis = making.sound("OGG", subtype="VORBIS")
    assert "a broken or truncated OGG file; send" in refused(vorbis[: vorbis.rindex(b"OggS") + 200])


def test_what_says_nothing_of_its_length_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAX_SOUND_S", 2)
    assert len(samples(making.sound("MP3", seconds=1.5)))
    assert "MP3 of 3 s; the limit is 2 s" in refused(making.sound("MP3", seconds=5))


def test_the_worker_loads_nothing_of_the_daemon() -> None:
    code = (
        "import sys, localrun.server.media.worker;"
        "heavy = {'starlette', 'uvicorn', 'httpx2', 'llama_cpp', 'rich', 'jinja2'} & set(sys.modules);"
        "ours = {m for m in sys.modules if m.startswith('localrun.')};"
        "print(sorted(heavy), sorted(ours))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("[] ")
    assert not any(f"localrun.{name}" in printed for name in ("config", "engine", "models", "server.app"))


def test_the_daemon_loads_no_decoder() -> None:
    code = "import sys, localrun.server.app; print(*sorted({'PIL', 'soundfile', 'soxr'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
