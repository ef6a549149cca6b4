"""The media worker: `python -m localrun.server.media.worker INPUT OUTPUT`, a process that decodes pictures and sound.

The bytes come from anybody, and decoders are native code: they run here, apart from the daemon, one file at a time, and
the daemon kills the process when one takes too long. Where the system has resource limits the worker bounds its own
memory and processor time and the size of its output, and cannot open a file or a socket, write a core dump or (unless
it runs as root) start a process: both files are open before the limits close. No decoder is chosen by the file: the
daemon has looked at its first bytes, and that format's alone is asked.

A picture becomes RGB with 8 bits a channel: its first frame, turned as its EXIF says, what is transparent laid on
white, 16 bits cut to their upper 8. Sound becomes float32 of one channel, the mean of all, cut to -1..1 and resampled;
what is 16 bits, of one channel and at the rate already is the samples divided by 32768.

Frames of `wire.DecodeRequest` come on stdin, those of `wire.DecodeReply` go to stdout. Ends when stdin ends. Imports
nothing of the daemon but `errors`, `framing`, `wire`, the headers and `worker_limits`; the daemon never imports this
module, so that it never loads a decoder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import re
import signal
import struct
import sys
import warnings
from typing import Any, BinaryIO

import numpy
import soundfile

# With the plugins that others load when they are first needed, which is too late here.
from PIL import (  # noqa: F401
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from localrun import framing
from localrun.errors import BadRequest, LocalrunError, of_disk
from localrun.server.media import headers
from localrun.sound_headers import header_of
from localrun.wire import DecodeReply, DecodeRequest, MediaKind
from localrun.worker_limits import allow_cpu, close_limits

soxr: Any = None
with contextlib.suppress(ImportError):  # there is none for Windows on Arm
    soxr = importlib.import_module("soxr")

MEMORY_BYTES = 1536 * 1024 * 1024
# Of the largest picture. Ten minutes of sound at 48 kHz are less.
OUTPUT_BYTES = headers.MAX_PIXELS * 3
_STRIP_PIXELS = 1024 * 1024
_SOUND_FORMATS = frozenset(("WAV", "WAVEX", "FLAC", "OGG", "MP3"))
# Those of Pillow that have more than 8 bits for the only channel.
_DEEP = frozenset(("I;16", "I;16B", "I;16L", "I;16N", "I"))
_WHITE = (255, 255, 255)
_OBJECT = re.compile(r".*<[\w.]+ object at \w+>[: ]*")


class _Output:
    """Writes the output file from its beginning, and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        file.seek(0)
        file.truncate(0)

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)

    def digest(self, kind: MediaKind, *sizes: int) -> bytes:
        self._file.flush()
        self._hash.update(" ".join((kind, *map(str, sizes))).encode())
        return self._hash.digest()


def picture(data: bytes, request: DecodeRequest, output: BinaryIO) -> DecodeReply:
    """Raises BadRequest, OSError of the disk, and whatever Pillow raises for a file that is none."""
    with Image.open(io.BytesIO(data), formats=(request.format.upper(),)) as opened:
        # A GIF's frame may be larger than its header says.
        headers.check_size(request.format, *opened.size, "")
        rgb = _rgb(opened)
    if request.max_side:
        rgb.thumbnail((request.max_side, request.max_side), Image.Resampling.LANCZOS)
    writer = _Output(output)
    width, height = rgb.size
    n_rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, n_rows):
        writer.write(rgb.crop((0, top, width, min(height, top + n_rows))).tobytes())
    return DecodeReply(digest=writer.digest(MediaKind.IMAGE, width, height), width=width, height=height)


def _rgb(opened: Image.Image) -> Image.Image:
    opened.load()
    image: Image.Image = opened
    if image.mode in _DEEP:
        image = Image.fromarray((numpy.asarray(image).astype(numpy.uint32) >> 8).astype(numpy.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        laid = Image.new("RGB", image.size, _WHITE)
        laid.paste(image, mask=image.getchannel("A"))
        image = laid
    elif image.mode != "RGB":
        image = image.convert("RGB")
    try:
        orientation = opened.getexif().get(0x0112, 1)
    except Exception:  # whatever is wrong with it, the picture is there
        orientation = 1
    how = _TURNS.get(orientation)
    return image if how is None else image.transpose(how)


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def sound(data: bytes, request: DecodeRequest, output: BinaryIO) -> DecodeReply:
    """Raises BadRequest, OSError of the disk, and whatever libsndfile raises for a file that is none."""
    writer = _Output(output)
    n_written = n_read = 0
    if request.format == "WAV" and not any(data[(at := header_of("WAV", data).data_at) - 4 : at]):
        # Written into a pipe: libsndfile knows only the other way to say so, and takes this for an empty one.
        data = data[: at - 4] + b"\xff" * 4 + data[at:]
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate_hz = file.samplerate
        if file.format not in _SOUND_FORMATS:
            raise BadRequest(f"{file.format} is not supported; send {headers.SOUNDS}")
        headers.check_rate(file.format, rate_hz, "")
        resampler = None
        if rate_hz != request.audio_rate_hz:
            if soxr is None:
                raise BadRequest(f"it must have {request.audio_rate_hz} samples a second: there is no soxr here")
            resampler = soxr.ResampleStream(rate_hz, request.audio_rate_hz, 1, dtype="float32")
        while True:
            block = file.read(rate_hz, dtype="float32", always_2d=True)
            n_read += len(block)
            if n_read > headers.MAX_SOUND_S * rate_hz:
                headers.check_length(file.format, n_read, rate_hz, "")
            if not numpy.isfinite(block).all():
                raise BadRequest("it has samples that are NaN or infinite; send it without them")
            mono = numpy.clip(block, -1, 1).mean(axis=1, dtype=numpy.float32)
            if resampler is not None:
                mono = resampler.resample_chunk(mono, last=not len(block))
            writer.write(mono.astype("<f4", copy=False).tobytes())
            n_written += len(mono)
            if not len(block):
                break
    if not n_read:  # its header did not say so
        raise ValueError
    headers.check_length(request.format, n_read, rate_hz, "")
    if n_written < headers.MIN_SAMPLES:
        raise BadRequest(
            f"{request.format} of {n_read} samples, which are {n_written} at the {request.audio_rate_hz} a second that "
            f"the model takes; at least {headers.MIN_SAMPLES} are needed; send a longer recording"
        )
    return DecodeReply(digest=writer.digest(MediaKind.AUDIO, n_written), n_samples=n_written)


def answer(request: DecodeRequest, data: bytes, output: BinaryIO) -> DecodeReply:
    """Decode one file; every failure becomes an error reply."""
    try:
        decode = picture if request.kind is MediaKind.IMAGE else sound
        return decode(data, request, output)
    except LocalrunError as error:
        return DecodeReply(error_code=error.code, error_message=error.message.removeprefix(": "))
    except MemoryError:
        return _refusal(f"decoding it needs more than {MEMORY_BYTES / 1e9:.1f} GB of memory; send a smaller one")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return _refusal(f"it has more than {headers.MAX_PIXELS // 10**6} million pixels; send a smaller one")
    except OSError as error:
        refused = of_disk(error) if error.errno else None
        if refused is not None:
            return DecodeReply(error_code=refused.code, error_message=refused.message)
        return _refusal(_broken(request, error))
    except Exception as error:
        return _refusal(_broken(request, error))


def _broken(request: DecodeRequest, error: Exception) -> str:
    said = " ".join(str(error).split())[:200].encode("ascii", "replace").decode()
    # Libraries name the object that they read from, which is nobody's file.
    said = _OBJECT.sub("", said) if not isinstance(error, UnidentifiedImageError) else ""
    return f"a broken or truncated {request.format} file{f' ({said})' if said else ''}; send a whole one"


def _refusal(message: str) -> DecodeReply:
    return DecodeReply(error_code=BadRequest.code, error_message=message)


def main(input_path: str, output_path: str) -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the daemon's terminal is the daemon's to handle
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    Image.MAX_IMAGE_PIXELS = headers.MAX_PIXELS
    _warm_up()
    # Never `stdout`: a library that prints would break the frames.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(input_path, "rb", buffering=0) as input_file, open(output_path, "r+b") as output_file:
        close_limits(memory_bytes=MEMORY_BYTES, file_bytes=OUTPUT_BYTES)
        _send(replies, DecodeReply())
        while (body := framing.read_body(sys.stdin.buffer)) is not None:
            request = framing.decode_to_media_worker(body)
            allow_cpu(request.cpu_s)
            input_file.seek(0)
            _send(replies, answer(request, input_file.read(request.size_bytes), output_file))


def _warm_up() -> None:
    """Decodes a little of everything, which makes Python and the libraries load what they load at first use."""
    for name in ("PNG", "JPEG", "GIF", "BMP", "WebP"):
        made = io.BytesIO()
        Image.new("P" if name == "GIF" else "RGB", (2, 2)).save(made, name)
        answer(DecodeRequest(kind=MediaKind.IMAGE, format=name, size_bytes=0, cpu_s=1, max_side=1),
               made.getvalue(), io.BytesIO())  # fmt: skip
    samples = struct.pack("<800h", *range(800))
    wave = b"RIFF" + struct.pack("<I", 36 + 1600) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    answer(DecodeRequest(kind=MediaKind.AUDIO, format="WAV", size_bytes=0, cpu_s=1, audio_rate_hz=16000),
           wave + b"data" + struct.pack("<I", 1600) + samples, io.BytesIO())  # fmt: skip


def _send(replies: BinaryIO, reply: DecodeReply) -> None:
    replies.write(framing.encode(reply))
    replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
