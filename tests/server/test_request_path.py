"""The files that a streamed chat runs through are those that the README lists."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.types import Message

import localrun.models
import localrun.server
from localrun.server import app
from localrun.server.http.limits import Limits
from tests import path_table

SERVER, MODELS = (Path(package.__path__[0]) for package in (localrun.server, localrun.models))
# Below uvicorn, and in the worker's process.
NOT_SEEN_HERE = {"http/connection.py", "templates/worker.py", "templates/marks.py"}
# Runs by the clock, whether there is a request or not.
BY_THE_CLOCK = {"engines/faults.py", "access/keys.py"}


def name_of(path: str) -> str | None:
    """As the README has it; None for what is not the daemon's."""
    if Path(path).is_relative_to(MODELS):
        return f"models/{Path(path).relative_to(MODELS).as_posix()}"
    return path_table.name_of(path, SERVER)


async def chat(limits: Limits) -> set[str]:
    """The files in which functions ran from the request's arrival to the last byte of its answer."""
    body = {"model": "alpha", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    arriving: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[bytes] = []
    paths: set[str] = set()

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            paths.add(frame.f_code.co_filename)

    async def receive() -> Message:
        if not arriving:
            await asyncio.Event().wait()  # the client stays
        return arriving.pop()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            sys.setprofile(None)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers
    }  # fmt: skip
    sys.setprofile(seen)
    try:
        await limits(scope, receive, send)
    finally:
        sys.setprofile(None)
    assert b"".join(sent).endswith(b"data: [DONE]\n\n")
    return {name for path in paths if (name := name_of(path)) is not None} - BY_THE_CLOCK


async def test_the_readme_lists_the_files_of_a_warm_chat(running: Any) -> None:
    async with running() as runtime:
        limits = app.build(runtime.settings, runtime)
        await chat(limits)
        files = path_table.listed(SERVER, "The path of a streamed chat")
        assert await chat(limits) | NOT_SEEN_HERE == set(files)
    assert len(files) == len(set(files)) <= 26
