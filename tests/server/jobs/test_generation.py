"""What a request keeps between its engine and its client."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest

from localrun import wire
from localrun.errors import ContextExceeded, EngineDied
from localrun.server.jobs.generation import MAX_UNREAD, MAX_UNREAD_CHARS, Generation
from localrun.server.jobs.job import Job, JobRequest


def _generation() -> Generation:
    return Generation("req_1", "/api/chat", "editor", wire.Lane.INTERACTIVE, "tiny", 100.0)


def _delta(text: str = "", **fields: Any) -> wire.Delta:
    return wire.Delta(id=1, phase=wire.Phase.DECODE, n_computed=1, n_output=1, text=text, **fields)


async def test_a_consumer_is_woken_once_for_all_that_is_there() -> None:
    job = Job(
        "req_1", JobRequest(model="tiny", api="/api/chat"), names=MagicMock(), lender=MagicMock(), observer=MagicMock()
    )
    seen: list[str] = []

    async def consume() -> None:
        while len(seen) < 3:
            seen.append((await anext(job)).text)

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0)
    for text in "abc":
        job.on_delta(_delta(text), 0.0)
    await asyncio.sleep(0)
    assert seen == ["a", "b", "c"]
    await consumer


def test_the_final_delta_is_given_and_then_the_iteration_ends() -> None:
    generation = _generation()
    assert generation.read() is None
    generation.keep(final := _delta(finish=wire.Finish.STOP))
    assert generation.read() is final
    with pytest.raises(StopAsyncIteration):
        generation.read()


def test_an_error_delta_is_raised_as_its_class() -> None:
    generation = _generation()
    generation.keep(_delta(finish=wire.Finish.ERROR, error_code="context_length_exceeded", error_message="9 > 8"))
    with pytest.raises(ContextExceeded, match="9 > 8"):
        generation.read()


def test_what_was_said_before_a_failure_is_still_given() -> None:
    generation = _generation()
    generation.keep(words := _delta("last words"))
    generation.fail(EngineDied("gone"))
    assert generation.read() is words
    with pytest.raises(EngineDied):
        generation.read()


def test_both_bounds_are_seen() -> None:
    many, long = _generation(), _generation()
    for _ in range(MAX_UNREAD - 1):
        many.keep(_delta())
    assert not many.is_behind
    many.keep(_delta())
    assert many.is_behind
    long.keep(_delta("x" * MAX_UNREAD_CHARS))
    assert long.is_behind
    long.read()
    assert not long.is_behind
