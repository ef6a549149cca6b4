"""Frames on the pipes between the daemon and its processes.

A frame is a 4-byte little-endian length and one msgpack-encoded struct, whose tag field says which (`wire.py`).

Does not: read or write pipes, but for `read_body` with a blocking one.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from localrun.wire import FromEngine, ToEngine

# One prompt of a million tokens as text is about 4 MB; a frame beyond this is a bug or an attack, not a request.
MAX_FRAME_BYTES = 64 * 1024 * 1024

_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The peer sent something that is not a frame. The pipe is unusable after it."""


def encode(message: object) -> bytes:
    """One frame: length prefix and msgpack body."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """The length that a 4-byte prefix announces. Raises FrameError beyond `MAX_FRAME_BYTES`."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
    return length


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises FrameError when the body is not one of `ToEngine`."""
    try:
        return _to_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error


def decode_from_engine(body: bytes) -> FromEngine:
    """Raises FrameError when the body is not one of `FromEngine`."""
    try:
        return _from_engine.decode(body)
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


_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
