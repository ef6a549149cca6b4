"""What a job keeps between its engine and its consumer."""

from __future__ import annotations

import asyncio

import pytest

from localrun import wire
from localrun.errors import ContextExceeded, EngineDied
from localrun.server.jobs.buffer import MAX_DELTAS, MAX_TEXT_CHARS, DeltaBuffer


def _delta(text: str = "", **fields: object) -> wire.Delta:
    return wire.Delta(id=1, phase=wire.Phase.DECODE, n_computed=1, n_output=1, text=text, **fields)  # type: ignore[arg-type]


async def test_a_consumer_is_woken_once_for_all_that_is_there() -> None:
    buffer = DeltaBuffer()
    turns: list[str] = []

    async def consume() -> None:
        while len(turns) < 3:
            turns.append((await buffer.take()).text)

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0)
    for text in "abc":
        buffer.put(_delta(text))
    await asyncio.sleep(0)
    assert turns == ["a", "b", "c"]
    await consumer


async def test_the_final_delta_is_given_and_then_the_iteration_ends() -> None:
    buffer = DeltaBuffer()
    buffer.put(_delta(finish=wire.Finish.STOP))
    assert (await buffer.take()).finish is wire.Finish.STOP
    with pytest.raises(StopAsyncIteration):
        await buffer.take()


async def test_an_error_delta_is_raised_as_its_class() -> None:
    buffer = DeltaBuffer()
    buffer.put(_delta(finish=wire.Finish.ERROR, error_code="context_length_exceeded", error_message="9 > 8"))
    with pytest.raises(ContextExceeded, match="9 > 8"):
        await buffer.take()


async def test_what_was_said_before_a_failure_is_still_given() -> None:
    buffer = DeltaBuffer()
    buffer.put(_delta("last words"))
    buffer.fail(EngineDied("gone"))
    assert (await buffer.take()).text == "last words"
    with pytest.raises(EngineDied):
        await buffer.take()


async def test_both_bounds_are_seen() -> None:
    many, long = DeltaBuffer(), DeltaBuffer()
    for _ in range(MAX_DELTAS - 1):
        many.put(_delta())
    assert not many.is_full
    many.put(_delta())
    assert many.is_full
    long.put(_delta("x" * MAX_TEXT_CHARS))
    assert long.is_full
    await long.take()
    assert not long.is_full
