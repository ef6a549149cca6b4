"""Several jobs as one sequence of deltas, and the loop that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from starlette.types import Message

from localrun.errors import Cancelled, EngineDied, LocalrunError
from localrun.server import streaming
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Shape
from localrun.server.jobs.job import Job
from localrun.wire import Delta, Finish, Phase


class StubJob:
    """A job's iteration without a job."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self.is_over = False

    def put(self, text: str, finish: Finish | None = None) -> None:
        self.news.put_nowait(Delta(1, Phase.DECODE, 1, 1, text, [1], None, finish))

    def fail(self, error: Exception) -> None:
        self.news.put_nowait(error)

    def __aiter__(self) -> StubJob:
        return self

    async def __anext__(self) -> Delta:
        if self.is_over:
            raise StopAsyncIteration
        news = await self.news.get()
        if isinstance(news, Exception):
            raise news
        self.is_over = news.finish is not None
        return news

    @property
    def has_ready(self) -> bool:
        return not self.news.empty()


def jobs(count: int) -> tuple[list[StubJob], list[Job]]:
    stubs = [StubJob() for _ in range(count)]
    return stubs, cast(list[Job], stubs)


async def test_one_job_says_what_is_waiting() -> None:
    (stub,), both = jobs(1)
    stub.put("a")
    stub.put("b")
    stub.put("c", Finish.STOP)
    seen = [(index, delta.text, more) async for index, delta, more in streaming.deltas(both)]
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
    async for index, delta, _ in streaming.deltas(both):
        seen[index].append(delta.text)
    await feeding
    assert seen == {0: ["00", "01"], 1: ["10", "11", "12"], 2: ["20", "21", "22", "23"]}


async def test_the_last_delta_of_a_batch_is_to_be_sent() -> None:
    stubs, both = jobs(2)
    for stub in stubs:
        stub.put("a")
    seen: list[Any] = []
    deltas = streaming.deltas(both)
    async for index, _, more in deltas:
        seen.append((index, more))
        if len(seen) == 2:
            break
    await deltas.aclose()
    assert [more for _, more in seen][-1] is False


async def test_one_failure_ends_all() -> None:
    stubs, both = jobs(3)
    stubs[0].put("a")
    stubs[1].fail(EngineDied("gone"))
    with pytest.raises(EngineDied):
        async for _ in streaming.deltas(both):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody waits for the other jobs any more"


async def test_leaving_early_leaves_no_task_behind() -> None:
    stubs, both = jobs(2)
    stubs[0].put("a")
    deltas = streaming.deltas(both)
    await anext(deltas)
    await deltas.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- the loop ---------------------------------------------------------------------------------------------------------


class Shown:
    """A writer that shows what it was given; thinks nothing of empty texts."""

    def begin(self) -> bytes:
        return b"[begin]"

    def take(self, index: int, delta: Delta) -> bytes:
        if delta.finish is Finish.CANCELLED:
            raise Cancelled("the request was cancelled")
        end = b"" if delta.finish is None else b"[end %d]" % index
        return delta.text.encode() + end

    def end(self) -> bytes:
        return b"[all]"


async def sent_by(both: list[Job], feeding: Callable[[], None] | None = None) -> list[bytes]:
    """The bodies of what is sent, the end included. `feeding` is called when the first of them was."""
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if feeding is not None and len(sent) == 1:
                feeding()

    exchange = Exchange({"path": "/api/chat", "headers": []}, None, send, Shape.OLLAMA)  # type: ignore[arg-type]
    try:
        await streaming.stream(exchange, both, Shown(), [])
    except LocalrunError as error:
        await exchange.refuse(error)
    assert exchange.started or not sent
    return sent


async def test_what_is_there_goes_in_one_send_and_the_last_with_the_end() -> None:
    (stub,), one = jobs(1)

    def more() -> None:
        stub.put("c")
        stub.put("", None)
        stub.put("d", Finish.STOP)

    stub.put("a")
    stub.put("b")
    assert await sent_by(one, more) == [b"[begin]ab", b"cd[end 0][all]"]


async def test_deltas_without_news_send_nothing() -> None:
    (stub,), one = jobs(1)

    async def feed() -> None:
        for _ in range(3):
            stub.put("")
            await asyncio.sleep(0)
        stub.put("a", Finish.STOP)

    feeding = asyncio.create_task(feed())
    assert await sent_by(one) == [b"[begin]", b"a[end 0][all]"]
    await feeding


async def test_a_stream_ends_when_all_its_jobs_have() -> None:
    stubs, both = jobs(2)
    stubs[0].put("a", Finish.STOP)

    def more() -> None:
        stubs[1].put("b", Finish.STOP)

    assert await sent_by(both, more) == [b"[begin]a[end 0]", b"b[end 1][all]"]


async def test_a_refusal_before_the_first_delta_begins_no_stream() -> None:
    (stub,), one = jobs(1)
    stub.fail(EngineDied("gone"))
    assert [b"gone" in body for body in await sent_by(one)] == [True]


async def test_what_was_said_before_it_broke_off_is_sent() -> None:
    (stub,), one = jobs(1)
    stub.put("a")
    stub.put("b")
    stub.put("", Finish.CANCELLED)
    *said, error = await sent_by(one)
    assert said == [b"[begin]ab"]
    assert b"the request was cancelled" in error
