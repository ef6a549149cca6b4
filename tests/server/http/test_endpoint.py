"""Every way a handler can end becomes one well-formed answer."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, cast

import pytest
from starlette.types import Message

from localrun.errors import ModelNotFound
from localrun.server.http.endpoint import Endpoint, Handler
from localrun.server.http.exchange import ClientGone, Exchange
from localrun.server.runtime import Runtime

NO_RUNTIME = cast(Runtime, None)
SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/api/chat", "headers": []}


async def _receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def run(handler: Handler) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await Endpoint(NO_RUNTIME, handler)(dict(SCOPE), _receive, send)
    return sent


def error_of(sent: list[Message]) -> str:
    return str(json.loads(sent[-1]["body"])["error"])


async def test_our_own_errors_have_their_status() -> None:
    async def handler(_: Runtime, __: Exchange) -> None:
        raise ModelNotFound("llama9")

    sent = await run(handler)
    assert sent[0]["status"] == 404
    assert (b"x-localrun-error", b"model_not_found") in sent[0]["headers"]
    assert "llama9" in error_of(sent)


async def test_a_bug_is_logged_and_tells_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(_: Runtime, __: Exchange) -> None:
        raise ZeroDivisionError("secret details")

    with caplog.at_level(logging.ERROR):
        sent = await run(handler)
    assert sent[0]["status"] == 500
    assert "secret" not in error_of(sent)
    assert "secret details" in caplog.text


async def test_a_bug_in_mid_stream_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(_: Runtime, exchange: Exchange) -> None:
        await exchange.open_stream()
        await exchange.write(b'{"done":false}\n')
        raise ZeroDivisionError

    with caplog.at_level(logging.CRITICAL):
        sent = await run(handler)
    assert sent[0]["status"] == 200
    assert sent[-1]["more_body"] is False
    assert "internal" in error_of(sent)


async def test_a_client_that_left_gets_nothing() -> None:
    async def handler(_: Runtime, __: Exchange) -> None:
        raise ClientGone

    assert await run(handler) == []


async def test_a_stopping_server_says_so() -> None:
    sent: list[Message] = []
    streaming = asyncio.Event()

    async def handler(_: Runtime, exchange: Exchange) -> None:
        await exchange.open_stream()
        streaming.set()
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    serving = asyncio.create_task(Endpoint(NO_RUNTIME, handler)(dict(SCOPE), _receive, send))
    await streaming.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert "stopping" in error_of(sent)
