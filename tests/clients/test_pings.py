"""The clients' own libraries on streams that are silent for long: a ping is nothing to any of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localrun.config import Settings
from localrun.server.app import build
from localrun.server.http import exchange
from localrun.server.runtime import Runtime
from tests.fakes import ENGINE

HELLO: Any = [{"role": "user", "content": "hello " * 60}]
URL = "http://localhost"


class Daemon:
    """A daemon's app whose steps take longer than its streams stay silent, and what it sent. Its prompts take several
    steps."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.sent = b""

    def sent_before(self, first_token: bytes) -> bytes:
        before, found, _ = self.sent.partition(first_token)
        assert found
        return before

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def recording(message: Message) -> None:
            self.sent += message.get("body", b"")
            await send(message)

        await self._app(scope, receive, recording)


@asynccontextmanager
async def serving() -> AsyncIterator[Daemon]:
    settings = Settings(kv_cells=2048, slots=2, batch_tokens=32)
    runtime = Runtime(settings, engine_command=ENGINE)
    await runtime.start()
    try:
        yield Daemon(build(settings, runtime))
    finally:
        await runtime.stop()


@pytest.fixture(autouse=True)
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALRUN_FAKE_STEP_MS", "60")
    monkeypatch.setattr(exchange, "PING_AFTER_S", 0.02)


async def test_ollama() -> None:
    async with serving() as daemon:
        client = ollama.AsyncClient(URL, transport=httpx.ASGITransport(app=daemon))
        parts = [part async for part in await client.chat("tiny", HELLO, stream=True, options={"num_predict": 4})]
    assert parts[-1].done
    assert daemon.sent_before(b"{").strip(b" ") == b"" != daemon.sent_before(b"{")


async def test_openai() -> None:
    async with serving() as daemon, httpx.AsyncClient(transport=httpx.ASGITransport(app=daemon)) as http:
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", http_client=http)
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert b": ping\n\n" in daemon.sent_before(b'"delta":{"content"')


async def test_openai_responses() -> None:
    async with serving() as daemon, httpx.AsyncClient(transport=httpx.ASGITransport(app=daemon)) as http:
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", http_client=http)
        text = HELLO[0]["content"]
        stream = await client.responses.create(model="tiny", input=text, max_output_tokens=16, stream=True)
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # Codex takes comments for silence.
    assert "response.in_progress" in kinds[2 : kinds.index("response.output_text.delta")]
    assert b": ping" not in daemon.sent


async def test_anthropic() -> None:
    async with serving() as daemon, httpx2.AsyncClient(transport=httpx2.ASGITransport(app=daemon)) as http:
        client = anthropic.AsyncAnthropic(base_url=URL, api_key="any", http_client=http)
        async with client.messages.stream(model="tiny", messages=HELLO, max_tokens=4) as stream:
            message = await stream.get_final_message()
    assert message.stop_reason == "max_tokens"
    assert daemon.sent_before(b"event: content_block_delta").count(b"event: ping") > 1
