"""Who holds the event loop is named, and a machine that is busy with something else is not blamed on anybody."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message

from localrun.config import Settings
from localrun.errors import BadRequest
from localrun.server.http.exchange import OPERATION, STALL_S, THREAD_BYTES, Endpoint, Exchange, LoopWatch, apart, held
from localrun.server.http.limits import Limits
from localrun.server.runtime import Runtime
from tests.server.waiting import until

NO_RUNTIME = cast(Runtime, SimpleNamespace(settings=Settings()))


def compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def values(watch: LoopWatch, name: str) -> dict[str, float]:
    families = {family.name: family for family in watch.collect()}
    return {sample.labels["operation"]: sample.value for sample in families[f"localrun_loop_{name}"].samples}


def test_a_route_is_named_by_its_template_and_not_by_what_a_client_wrote(caplog: pytest.LogCaptureFixture) -> None:
    """All the way from the middleware to the page of metrics, beside a route that only waits for the slow one."""
    watch = LoopWatch()

    async def slow(_: Runtime, exchange: Exchange) -> None:
        compute(1.5 * STALL_S)
        await exchange.answer_json({})

    async def waits(_: Runtime, exchange: Exchange) -> None:
        await asyncio.sleep(STALL_S / 10)
        await exchange.answer_json({})

    app = Starlette(
        routes=[
            Route("/slow/{name}", Endpoint(partial(slow, NO_RUNTIME), "/slow/{name}")),
            Route("/waits", Endpoint(partial(waits, NO_RUNTIME), "/waits")),
        ]
    )
    limits = Limits(app, Settings(), None, watch)

    async def ask(path: str) -> int:
        sent: list[Message] = []

        async def receive() -> Message:
            return await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "client": ("127.0.0.1", 1)}
        await limits(scope | {"headers": [(b"host", b"localhost")]}, receive, send)
        return int(sent[0]["status"])

    async def both() -> list[int]:
        return await asyncio.gather(ask("/waits"), ask("/slow/my-secret"), ask("/unknown-secret"))

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(both()) == [200, 200, 404]
    assert values(watch, "stalls") == {"GET /slow/{name}": 1}
    assert set(values(watch, "seconds")) == {"GET /waits", "GET /slow/{name}", "other"}
    assert values(watch, "longest_seconds")["GET /slow/{name}"] == pytest.approx(1.5 * STALL_S, rel=0.3)
    assert values(watch, "longest_seconds")["GET /waits"] < STALL_S / 2
    assert "secret" not in caplog.text


async def serve(watch: LoopWatch, operation: str, *turns: Any) -> None:
    scope: dict[str, Any] = {"type": "http"}

    async def handler() -> None:
        await asyncio.sleep(0)
        scope[OPERATION] = operation
        for turn in turns:
            turn()
            await asyncio.sleep(0)

    await watch.watched(scope, handler())


async def test_the_operation_that_computes_in_the_loop_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch()
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(
            serve(watch, "POST /slow", lambda: compute(1.5 * STALL_S), lambda: compute(0.2 * STALL_S)),
            *(serve(watch, "GET /quick", *[lambda: None] * 100) for _ in range(10)),
        )
    assert values(watch, "stalls") == {"POST /slow": 1}
    assert values(watch, "longest_seconds")["POST /slow"] == pytest.approx(1.5 * STALL_S, rel=0.2)
    seconds = values(watch, "seconds")
    assert seconds["POST /slow"] == pytest.approx(1.7 * STALL_S, rel=0.2)
    assert seconds["GET /quick"] < STALL_S
    (line,) = caplog.messages
    assert line.startswith("POST /slow held the event loop for 1")


async def test_waiting_for_the_processor_is_nobodys_doing() -> None:
    watch = LoopWatch()
    # As long a turn, in which the thread gets no processor.
    await serve(watch, "POST /idle", lambda: time.sleep(2 * STALL_S))
    assert values(watch, "stalls") == {}
    assert values(watch, "seconds")["POST /idle"] < STALL_S


async def test_what_keeps_the_interpreters_lock_in_a_thread_counts() -> None:
    watch, scope = LoopWatch(), {"type": "http", OPERATION: "POST /large"}

    def decode() -> None:
        with held(scope):
            compute(1.5 * STALL_S)

    async def handler() -> None:
        await asyncio.to_thread(decode)

    await watch.watched(scope, handler())
    assert values(watch, "stalls") == {"POST /large": 1}


async def test_an_error_a_result_and_a_cancel_pass_through() -> None:
    watch, seen = LoopWatch(), []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await watch.watched({}, fails())

    async def waits() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    async def task() -> None:
        await watch.watched({}, waits())

    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seen == ["cleaned up"]


@pytest.mark.parametrize("n_bytes", [10, 2 * THREAD_BYTES])
async def test_a_body_is_gone_with_its_refusal(n_bytes: int) -> None:
    """Nothing is left to the collector of cycles, which looks at all of a large body's values in the event loop."""
    watch, bodies = LoopWatch(), []

    class Body(msgspec.Struct, weakref=True):
        text: str

    def checked(body: Body) -> None:
        raise BadRequest(f"text: {len(body.text)} characters are too many", field="text")

    async def handler(_: Runtime, exchange: Exchange) -> None:
        body = await exchange.read_json(Body)
        bodies.append(weakref.ref(body))
        await apart(checked, body)

    async def receive() -> Message:
        return {"type": "http.request", "body": msgspec.json.encode(Body("x" * n_bytes)), "more_body": False}

    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    gc.disable()
    try:
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
        await watch.watched(scope, Endpoint(partial(handler, NO_RUNTIME), "/x")(scope, receive, send))
        assert statuses == [400]
        assert len(bodies) == 1
        await until(lambda: bodies[0]() is None)  # a thread may be about to let go of it
    finally:
        gc.enable()
