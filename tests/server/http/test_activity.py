"""Idle time."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from localrun.server.http.activity import Activity


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def _send(_: Message) -> None:
    return None


async def test_idle_is_the_time_without_a_request() -> None:
    inside = asyncio.Event()
    leave = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inside.set()
        await leave.wait()

    activity = Activity(app)
    await asyncio.sleep(0.01)
    assert activity.idle_s() > 0
    two = [asyncio.create_task(activity({"type": "http"}, _receive, _send)) for _ in range(2)]
    await inside.wait()
    assert activity.idle_s() == 0
    two[0].cancel()
    await asyncio.wait([two[0]])
    assert activity.idle_s() == 0, "one is still open"
    leave.set()
    await two[1]
    await asyncio.sleep(0.01)
    assert 0 < activity.idle_s() < 60


async def test_the_lifespan_is_no_request() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    activity = Activity(app)
    await activity({"type": "lifespan"}, _receive, _send)
    assert seen == ["lifespan"]
    assert activity.idle_s() > 0
