"""Frames come out whole and in order, however the pipe cut them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun import framing
from localrun.server.engines.frame_buffer import FrameBuffer


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(bodies=st.lists(st.binary(max_size=40), max_size=12), cuts=st.lists(st.integers(1, 30), max_size=60))
def test_any_cutting_gives_the_same_bodies(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(_frame(body) for body in bodies)
    buffer, found, at = FrameBuffer(), [], 0
    for size in [*cuts, len(stream)]:
        found += buffer.feed(stream[at : at + size])
        at += size
    assert found == bodies
    assert not buffer.is_mid_frame


def test_a_part_of_a_frame_waits() -> None:
    buffer = FrameBuffer()
    assert list(buffer.feed(_frame(b"whole") + _frame(b"part")[:5])) == [b"whole"]
    assert buffer.is_mid_frame
    assert list(buffer.feed(b"art")) == [b"part"]


def test_a_frame_that_its_taker_fails_on_does_not_come_again() -> None:
    buffer = FrameBuffer()
    for body in buffer.feed(_frame(b"one") + _frame(b"two")):
        assert body == b"one"
        break
    assert list(buffer.feed(b"")) == [b"two"]


def test_an_absurd_length_is_refused_before_it_is_awaited() -> None:
    buffer = FrameBuffer()
    with pytest.raises(framing.FrameError, match="limit"):
        list(buffer.feed(struct.pack("<I", framing.MAX_FRAME_BYTES + 1)))
