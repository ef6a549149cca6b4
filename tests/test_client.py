"""The client against a scripted daemon: what it sends, how it reads streams, and what each failure becomes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpcore2
import httpx2
import msgspec
import pytest

from localrun import errors
from localrun.client import Client, LineBuffer
from localrun.snapshot import Aggregate, Snapshot, SystemRow

Reply = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request as it came in, and the pen for the answer."""

    def __init__(self, start: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        self.method, self.path, _ = start.split(" ")
        self.headers = headers
        self.body = json.loads(body) if body else None
        self._writer = writer

    async def answer(self, value: object, status: int = 200, **headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        await self.start(status, **headers, content_length=str(len(content)))
        await self.write(content)

    async def start(self, status: int = 200, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        await self.write("\r\n".join([*lines, "", ""]).encode())

    async def stream(self, *chunks: bytes, **headers: str) -> None:
        await self.start(transfer_encoding="chunked", **headers)
        for chunk in chunks:
            await self.chunk(chunk)
        await self.write(b"0\r\n\r\n")

    async def chunk(self, chunk: bytes) -> None:
        await self.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def drop(self) -> None:
        self._writer.close()


class Daemon:
    """Answers every request with `reply`. Counts connections; `gone` is set when a client closes one."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.connections = 0
        self.seen: list[Exchange] = []
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                start, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                exchange = Exchange(start, headers, body, writer)
                self.seen.append(exchange)
                await self._reply(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def _daemon(reply: Reply) -> AsyncIterator[tuple[Daemon, Client]]:
    daemon = Daemon(reply)
    server = await asyncio.start_server(daemon.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}", name="tester") as client:
        yield daemon, client


def _line(**fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


LAST = _line(
    message={"role": "assistant", "content": ""}, done=True, done_reason="stop", prompt_eval_count=12,
    prompt_eval_cached_count=8, eval_count=3, load_duration=500_000_000, prompt_eval_duration=250_000_000,
    eval_duration=1_500_000_000, total_duration=2_250_000_000, draft_count=4, draft_accepted_count=2, speedup=1.5,
)  # fmt: skip


async def test_no_certificate_is_read_on_the_way_to_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(httpcore2, "default_ssl_context", None)
    async with _daemon(lambda exchange: exchange.answer({"models": []})) as (_, client):
        assert await client.models() == []


async def test_chat_streams_pieces_then_metrics():
    async def reply(exchange: Exchange) -> None:
        lines = [_line(message={"role": "assistant", "content": text}) for text in ("Hel", "lo\u2028\x85", " wörld")]
        data = b"".join([*lines, LAST])
        cuts = [data[start : start + 7] for start in range(0, len(data), 7)]  # also inside characters
        await exchange.stream(*cuts, x_localrun_request="req_1")

    async with _daemon(reply) as (daemon, client):
        messages = [{"role": "user", "content": "hi"}]
        pieces = [piece async for piece in client.chat("tiny", messages, options={"seed": 1}, lane="batch")]
    assert [piece.text for piece in pieces] == ["Hel", "lo\u2028\x85", " wörld", ""]
    assert [piece.done for piece in pieces] == [False, False, False, True]
    assert {piece.request_id for piece in pieces} == {"req_1"}
    assert pieces[-1].done_reason == "stop"
    assert msgspec.structs.asdict(pieces[-1].metrics) == {
        "prompt_tokens": 12, "cached_tokens": 8, "output_tokens": 3,
        "load_s": 0.5, "prefill_s": 0.25, "decode_s": 1.5, "total_s": 2.25,
        "drafted_tokens": 4, "accepted_tokens": 2, "speedup": 1.5,
    }  # fmt: skip
    (request,) = daemon.seen
    assert (request.method, request.path) == ("POST", "/api/chat")
    assert request.body == {"model": "tiny", "messages": messages, "options": {"seed": 1}, "stream": True}
    assert request.headers["x-localrun-lane"] == "batch"
    assert request.headers["x-localrun-client"] == "tester"
    assert request.headers["content-type"] == "application/json"


async def test_one_connection_serves_answers_in_turn():
    async def reply(exchange: Exchange) -> None:
        await exchange.stream(LAST)

    async with _daemon(reply) as (daemon, client):
        for _ in range(3):
            assert [piece.done async for piece in client.chat("tiny", [])] == [True]
        assert daemon.connections == 1


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_an_abandoned_stream_is_closed_at_once(how):
    async def reply(exchange: Exchange) -> None:
        await exchange.start(transfer_encoding="chunked")
        while True:  # for ever: only a closed connection ends it
            await exchange.chunk(_line(message={"content": "x"}))
            await asyncio.sleep(0.001)

    async with _daemon(reply) as (daemon, client):
        stream = client.chat("tiny", [])
        assert (await anext(stream)).text == "x"
        if how == "close":
            await stream.aclose()
        else:
            reading = asyncio.create_task(_read_all(stream))
            await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        await asyncio.wait_for(daemon.gone.wait(), 10)


async def _read_all(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    ("status", "code", "body", "kind", "message"),
    [
        (404, "model_not_found", {"error": "model 'x' not found"}, errors.ModelNotFound, "model 'x' not found"),
        (400, "context_length_exceeded", {"error": "too long"}, errors.ContextExceeded, "too long"),
        (429, "queue_full", {"error": {"code": "queue_full", "message": "full"}}, errors.QueueFull, "full"),
        (507, "cannot_fit", {"error": "needs 9 GB"}, errors.CannotFit, "needs 9 GB"),
        (502, "", b"<html>bad gateway</html>", errors.LocalrunError, "HTTP status 502"),
    ],
)
async def test_refusals_come_back_as_the_errors_they_were(status, code, body, kind, message):
    async def reply(exchange: Exchange) -> None:
        headers = {"x_localrun_error": code} if code else {}
        await exchange.answer(body, status, **headers)

    async with _daemon(reply) as (_, client):
        for call in (_read_all(client.chat("x", [])), client.show("x"), client.load("x")):
            with pytest.raises(kind, match=message) as raised:
                await call
            assert type(raised.value) is kind


async def test_a_full_queue_says_when_to_come_back():
    async def reply(exchange: Exchange) -> None:
        await exchange.answer({"error": "full"}, 429, x_localrun_error="queue_full", retry_after="17")

    async with _daemon(reply) as (_, client):
        with pytest.raises(errors.QueueFull) as raised:
            await client.load("x")
        assert raised.value.retry_after_s == 17


async def test_an_error_line_in_a_stream_is_raised():
    async def reply(exchange: Exchange) -> None:
        await exchange.stream(_line(message={"content": "a"}), _line(error="the engine is gone", code="engine_died"))

    async with _daemon(reply) as (_, client):
        stream = client.chat("tiny", [])
        assert (await anext(stream)).text == "a"
        with pytest.raises(errors.EngineDied, match="the engine is gone"):
            await anext(stream)


@pytest.mark.parametrize("ending", ["dropped", "short", "garbage"])
async def test_a_stream_that_breaks_off_is_an_unreachable_daemon(ending):
    async def reply(exchange: Exchange) -> None:
        await exchange.start(transfer_encoding="chunked")
        await exchange.chunk(_line(message={"content": "a"}) + b'{"message":{"con')
        if ending == "dropped":
            exchange.drop()
        elif ending == "garbage":
            await exchange.chunk(b"\n")
        await exchange.write(b"0\r\n\r\n")

    async with _daemon(reply) as (_, client):
        stream = client.chat("tiny", [])
        assert (await anext(stream)).text == "a"
        with pytest.raises(errors.DaemonUnreachable) as raised:
            await anext(stream)
    if ending == "dropped":
        assert str(raised.value) == f"the daemon at {client.base_url} went away: the connection broke"


async def test_no_daemon_is_named_with_the_way_out():
    async with _daemon(lambda exchange: exchange.answer({})) as (_, client):
        base_url = client.base_url
    async with Client(base_url) as client:
        with pytest.raises(errors.DaemonUnreachable, match="localrun serve"):
            await client.models()


async def test_events_yield_snapshots_until_the_daemon_goes():
    snapshot = Snapshot(
        time_s=1.0, uptime_s=2.0, version="1", aggregate=Aggregate(running=3), engines=[], requests=[],
        system=SystemRow(),
    )  # fmt: skip
    event = b"event: snapshot\ndata: " + msgspec.json.encode(snapshot) + b"\n\n"

    async def reply(exchange: Exchange) -> None:
        await exchange.stream(b": hello\n\n" + event[:30], event[30:] + event)

    async with _daemon(reply) as (daemon, client):
        stream = client.events(hz=10)
        seen = [await anext(stream), await anext(stream)]
        with pytest.raises(errors.DaemonUnreachable):
            await anext(stream)
    assert [item.aggregate.running for item in seen] == [3, 3]
    assert daemon.seen[0].path == "/localrun/v1/events?hz=10"


async def test_plain_calls():
    told = ("tiny:latest", "hf.co/Owner/Repo:Q4_0", "hf.co/owner/repo:latest", "me/own:v1", "hf.co/tiny:latest")
    rows = [{"name": name, "size": 1} for name in ("tiny", "Owner/Repo:Q4_0", "owner/repo", "me/own:v1", "hf.co/tiny")]

    async def reply(exchange: Exchange) -> None:
        await exchange.answer({"models": [{"name": name, "size": 1} for name in told], "done": True})

    async with _daemon(reply) as (daemon, client):
        assert await client.models() == rows
        assert await client.loaded() == rows
        await client.load("tiny")
        await client.unload("tiny")
        await client.shutdown()
    asked = [(exchange.method, exchange.path, exchange.body) for exchange in daemon.seen]
    assert asked == [
        ("GET", "/api/tags", None),
        ("GET", "/api/ps", None),
        ("POST", "/api/generate", {"model": "tiny", "stream": False}),
        ("POST", "/api/generate", {"model": "tiny", "stream": False, "keep_alive": 0}),
        ("POST", "/localrun/v1/shutdown", {}),
    ]


@pytest.mark.parametrize(("status", "cancelled"), [(200, True), (404, False), (409, False)])
async def test_cancel_says_whether_there_was_something_to_cancel(status, cancelled):
    codes = {404: "not_found", 409: "conflict"}

    async def reply(exchange: Exchange) -> None:
        headers = {"x_localrun_error": codes[status]} if status in codes else {}
        await exchange.answer({"error": {"message": "no"}}, status, **headers)

    async with _daemon(reply) as (daemon, client):
        assert await client.cancel("req_9") is cancelled
    assert (daemon.seen[0].method, daemon.seen[0].path) == ("DELETE", "/localrun/v1/requests/req_9")


async def test_text_that_is_not_unicode_is_refused_before_it_is_sent():
    async with _daemon(lambda exchange: exchange.answer({})) as (daemon, client):
        with pytest.raises(errors.BadRequest, match="surrogate"):
            await _read_all(client.chat("tiny", [{"role": "user", "content": "\ud800"}]))
    assert daemon.seen == []


def test_lines_are_cut_at_line_feeds_only_and_a_broken_last_one_is_dropped():
    buffer = LineBuffer()
    fed = [buffer.feed(chunk) for chunk in (b"a\r\x0b", b"b\n\nc", b"\n", b"rest")]
    assert fed == [[], [b"a\r\x0bb"], [b"c"], []]


@pytest.mark.parametrize("answer", [{"models": 1, "pulls": [{}]}, [], "text"])
@pytest.mark.parametrize("name", ["snapshot", "cache", "pulls", "models", "loaded", "catalog"])
async def test_a_daemon_of_another_version_is_said_to_be_one(name: str, answer: Any):
    async def reply(exchange: Exchange) -> None:
        await exchange.answer(answer)

    async with _daemon(reply) as (_, client):
        with pytest.raises(errors.DaemonUnreachable, match=r"another version.*localrun version"):
            await getattr(client, name)()


@pytest.mark.parametrize("name", ["events", "logs"])
async def test_a_stream_of_another_version_is_said_to_be_one(name: str):
    async def reply(exchange: Exchange) -> None:
        await exchange.stream(b'event: x\ndata: {"of": "tomorrow"}\n\n')

    async with _daemon(reply) as (_, client):
        with pytest.raises(errors.DaemonUnreachable, match="or one of another version"):
            await anext(getattr(client, name)())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (httpx2.ConnectTimeout(""), "took no connection within 5 s; the machine is off or very busy"),
        (httpx2.ConnectError("refused"), "no daemon answers at http://127.0.0.1:9; `localrun serve` starts one"),
    ],
)
async def test_no_answer_and_no_daemon_are_told_apart(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: object) -> httpx2.Response:
        raise error

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", refuse)
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(errors.DaemonUnreachable, match=re.escape(said)):
            await client.models()
