"""Several jobs as one sequence of deltas."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from localrun.errors import EngineDied
from localrun.server.jobs.delta_buffer import DeltaBuffer
from localrun.server.jobs.job import Job
from localrun.server.openai import choices
from localrun.wire import Delta, Finish, Phase


class StubJob:
    """A job's iteration without a job."""

    def __init__(self) -> None:
        self.buffer = DeltaBuffer()

    def put(self, text: str, finish: Finish | None = None) -> None:
        self.buffer.put(Delta(1, Phase.DECODE, 1, 1, text, [1], None, finish))

    def __aiter__(self) -> StubJob:
        return self

    async def __anext__(self) -> Delta:
        return await self.buffer.take()

    @property
    def has_ready(self) -> bool:
        return len(self.buffer) > 0


def jobs(count: int) -> tuple[list[StubJob], list[Job]]:
    stubs = [StubJob() for _ in range(count)]
    return stubs, cast(list[Job], stubs)


async def test_one_job_says_what_is_waiting() -> None:
    (stub,), both = jobs(1)
    stub.put("a")
    stub.put("b")
    stub.put("c", Finish.STOP)
    seen = [(index, delta.text, more) async for index, delta, more in choices.deltas(both)]
    assert seen == [(0, "a", True), (0, "b", True), (0, "c", False)]


async def test_several_jobs_are_interleaved_and_all_end() -> None:
    stubs, both = jobs(3)

    async def feed() -> None:
        for turn in range(4):
            for number, stub in enumerate(stubs):
                if turn <= number + 1:
                    stub.put(f"{number}{turn}", Finish.STOP if turn == number + 1 else None)
            await asyncio.sleep(0)

    feeding = asyncio.create_task(feed())
    seen: dict[int, list[str]] = {0: [], 1: [], 2: []}
    async for index, delta, _ in choices.deltas(both):
        seen[index].append(delta.text)
    await feeding
    assert seen == {0: ["00", "01"], 1: ["10", "11", "12"], 2: ["20", "21", "22", "23"]}


async def test_the_last_delta_of_a_batch_is_to_be_sent() -> None:
    stubs, both = jobs(2)
    for stub in stubs:
        stub.put("a")
    seen: list[Any] = []
    deltas = choices.deltas(both)
    async for index, _, more in deltas:
        seen.append((index, more))
        if len(seen) == 2:
            break
    await deltas.aclose()
    assert [more for _, more in seen][-1] is False


async def test_one_failure_ends_all() -> None:
    stubs, both = jobs(3)
    stubs[0].put("a")
    stubs[1].buffer.fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        async for _ in choices.deltas(both):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody waits for the other jobs any more"


async def test_leaving_early_leaves_no_task_behind() -> None:
    stubs, both = jobs(2)
    stubs[0].put("a")
    deltas = choices.deltas(both)
    await anext(deltas)
    await deltas.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
