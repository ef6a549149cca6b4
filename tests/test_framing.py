"""Frames: whole, cut off, too long, and such that are no messages."""

from __future__ import annotations

import io
import struct

import msgspec
import pytest

from localrun import framing
from localrun.framing import FrameError
from localrun.wire import Cancel, OpenFailed


def test_frames_come_one_after_the_other_and_end_cleanly():
    stream = io.BytesIO(framing.encode(Cancel(1)) + framing.encode(Cancel(2)))
    assert [framing.decode_to_engine(framing.read_body(stream)) for _ in range(2)] == [Cancel(1), Cancel(2)]
    assert framing.read_body(stream) is None


@pytest.mark.parametrize("n_bytes", [1, 3, 4, 7])
def test_a_frame_that_breaks_off_is_an_error_and_not_an_end(n_bytes: int):
    with pytest.raises(FrameError, match="ended inside"):
        framing.read_body(io.BytesIO(framing.encode(Cancel(1))[:n_bytes]))


def test_a_length_beyond_the_limit_is_refused_before_it_is_read():
    assert framing.body_length(struct.pack("<I", framing.MAX_FRAME_BYTES)) == framing.MAX_FRAME_BYTES
    with pytest.raises(FrameError, match="limit"):
        framing.body_length(struct.pack("<I", framing.MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "nonsense"}),
        msgspec.msgpack.encode({"type": "submit"}),
        msgspec.msgpack.encode({"type": "cancel", "id": "one"}),
        msgspec.msgpack.encode([1, 2]),
        framing.encode(OpenFailed(code="bad_model_file", message="no"))[4:],
        b"\x82\xa4type\xa6cancel\xa2id\xa1\xff",
    ],
)
def test_a_body_that_is_no_message_is_a_frame_error(body: bytes):
    with pytest.raises(FrameError):
        framing.decode_to_engine(body)


def test_a_message_of_the_wrong_direction_is_a_frame_error():
    with pytest.raises(FrameError):
        framing.decode_from_engine(framing.encode(Cancel(1))[4:])
