"""A child process and its pipes, without any meaning in the frames."""

from __future__ import annotations

import asyncio
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun import framing, wire
from localrun.server.engines.link import End, EndKind, EngineChild


async def test_lines_come_whole_and_the_last_one_without_its_newline_too() -> None:
    lines: list[str] = []
    ends: list[End] = []
    child = EngineChild(on_message=lambda message: None, on_line=lines.append, on_end=ends.append)
    program = r"import os; os.write(2, b'one\ntw'); os.write(2, b'o\n\n\xff\nlast')"
    await child.spawn([sys.executable, "-c", program])
    while not ends:  # noqa: ASYNC110 - the callback is the interface
        await asyncio.sleep(0.005)
    assert lines == ["one", "two", "\ufffd", "last"]
    assert ends == [End(EndKind.ENDED_BY_OTHERS, "exited with status 0")]


async def test_a_child_that_ended_takes_no_more_writes_and_stops_at_once() -> None:
    ends: list[End] = []
    child = EngineChild(on_message=lambda message: None, on_line=lambda line: None, on_end=ends.append)
    await child.spawn([sys.executable, "-c", "import sys; sys.exit(5)"])
    await child.stop()
    child.write(wire.Cancel(1))
    child.kill()
    await child.writable()
    await child.stop()
    assert len(ends) == 1


async def test_writing_waits_while_the_child_does_not_read() -> None:
    child = EngineChild(on_message=lambda message: None, on_line=lambda line: None, on_end=lambda end: None)
    await child.spawn([sys.executable, "-c", "import time; time.sleep(600)"])
    child.write(wire.Count(id=1, segments=(wire.Segment("x" * 4_000_000),)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.writable(), 0.2)
    await child.stop()
    await asyncio.wait_for(child.writable(), 5)


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(bodies=st.lists(st.binary(max_size=40), max_size=12), cuts=st.lists(st.integers(1, 30), max_size=60))
def test_any_cutting_gives_the_same_bodies(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(_frame(body) for body in bodies)
    buffer, found, at = framing.FrameBuffer(), [], 0
    for size in [*cuts, len(stream)]:
        found += buffer.feed(stream[at : at + size])
        at += size
    assert found == bodies
    assert list(buffer.feed(_frame(b"next"))) == [b"next"]


def test_a_part_of_a_frame_waits() -> None:
    buffer = framing.FrameBuffer()
    assert list(buffer.feed(_frame(b"whole") + _frame(b"part")[:5])) == [b"whole"]
    assert list(buffer.feed(b"art")) == [b"part"]


def test_a_frame_that_its_taker_fails_on_does_not_come_again() -> None:
    buffer = framing.FrameBuffer()
    for body in buffer.feed(_frame(b"one") + _frame(b"two")):
        assert body == b"one"
        break
    assert list(buffer.feed(b"")) == [b"two"]


def test_an_absurd_length_is_refused_before_it_is_awaited() -> None:
    buffer = framing.FrameBuffer()
    with pytest.raises(framing.FrameError, match="limit"):
        list(buffer.feed(struct.pack("<I", framing.MAX_FRAME_BYTES + 1)))
