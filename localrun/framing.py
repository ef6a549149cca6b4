"""Frames on the pipes between the daemon and its processes.

A frame is a 4-byte little-endian length and one msgpack-encoded struct of `wire.py`; where there are several, its tag
field says which.

Does not: read or write pipes, but for `read_body` with a blocking one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, TypeVar

import msgspec

from localrun.wire import (
    DecodeReply,
    DecodeRequest,
    FromEngine,
    GrammarCheck,
    GrammarChecked,
    RenderReply,
    RenderRequest,
    ToEngine,
)

# One prompt of a million tokens as text is about 4 MB; a frame beyond this is a bug or an attack, not a request.
MAX_FRAME_BYTES = 64 * 1024 * 1024

_LENGTH = struct.Struct("<I")
_Message = TypeVar("_Message")


class FrameError(Exception):
    """The peer sent something that is not a frame. The pipe is unusable after it."""


class FrameTooLarge(Exception):
    """A message that no frame can hold. Whoever wanted to send it fails; the pipe is as good as before."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(f"{n_bytes / 1e6:.0f} MB, and {MAX_FRAME_BYTES / 1e6:.0f} MB are the most")


def encode(message: object) -> bytes:
    """One frame: length prefix and msgpack body. Raises FrameTooLarge."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(body))
    return _LENGTH.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """The length that a 4-byte prefix announces. Raises FrameError beyond `MAX_FRAME_BYTES`."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
    return length


def decoded(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    """Raises FrameError when the body is nothing that `decoder` knows."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error


def read_body(stream: BinaryIO) -> bytes | None:
    """The next frame's body from a blocking, buffered stream; None at a clean end. Raises FrameError in mid-frame."""
    prefix = stream.read(_LENGTH.size)
    if not prefix:
        return None
    if len(prefix) < _LENGTH.size:
        raise FrameError("the pipe ended inside a frame's length")
    length = body_length(prefix)
    body = stream.read(length)
    if len(body) < length:
        raise FrameError(f"the pipe ended inside a frame: {len(body)} of {length} bytes")
    return body


class FrameBuffer:
    """Cuts a byte stream into frame bodies.

    A pipe delivers whatever it likes: half a length prefix, or forty frames at once. What is not yet a whole frame
    stays here, at most `MAX_FRAME_BYTES` and one read.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes. Consume the iterator to its end before the next call.

        Raises FrameError when a length beyond the limit is announced.
        """
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= _LENGTH.size:
                body_start = start + _LENGTH.size
                end = body_start + body_length(bytes(self._bytes[start:body_start]))
                if end > len(self._bytes):
                    break
                # Before the yield: a body that its taker fails on must not come again.
                start = end
                yield bytes(self._bytes[body_start:end])
        finally:
            del self._bytes[:start]


_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
# Each takes a body, and raises FrameError when that is nothing of its kind.
decode_to_engine = partial(decoded, _to_engine)
decode_from_engine = partial(decoded, _from_engine)
decode_to_renderer = partial(decoded, msgspec.msgpack.Decoder(RenderRequest))
decode_from_renderer = partial(decoded, msgspec.msgpack.Decoder(RenderReply))
decode_to_media_worker = partial(decoded, msgspec.msgpack.Decoder(DecodeRequest))
decode_from_media_worker = partial(decoded, msgspec.msgpack.Decoder(DecodeReply))
decode_to_grammar_worker = partial(decoded, msgspec.msgpack.Decoder(GrammarCheck))
decode_from_grammar_worker = partial(decoded, msgspec.msgpack.Decoder(GrammarChecked))
