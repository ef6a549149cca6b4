"""One request and its answer: strict JSON into structs, streams, and a client that leaves."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast

import msgspec
import pytest
from starlette.types import Message

from localrun.config import Settings
from localrun.errors import BadRequest, EngineDied, ModelNotFound, TooLarge
from localrun.server.http import exchange as exchange_module
from localrun.server.http.exchange import MAX_VALUES, ClientGone, Endpoint, Exchange, decode_body
from localrun.server.http.failures import Shape, shape_of
from localrun.server.http.operation import Handler
from localrun.server.runtime import Runtime
from tests.says import says
from tests.server.waiting import until


class Wire:
    """The server's side of the ASGI channel, with a client that stays until `leave`."""

    def __init__(self, *pieces: bytes) -> None:
        self.sent: list[Message] = []
        self._arriving: asyncio.Queue[Message] = asyncio.Queue()
        for at, piece in enumerate(pieces, start=1):
            self._arriving.put_nowait({"type": "http.request", "body": piece, "more_body": at < len(pieces)})

    async def receive(self) -> Message:
        return await self._arriving.get()

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.leave()  # as uvicorn does: a complete answer is followed by a disconnect

    def leave(self) -> None:
        self._arriving.put_nowait({"type": "http.disconnect"})

    def exchange(self, path: str = "/api/chat", headers: list[tuple[bytes, bytes]] | None = None) -> Exchange:
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers or []}
        return Exchange(scope, self.receive, self.send, shape_of(scope["path"]))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


async def test_a_body_in_pieces_is_one_body() -> None:
    assert await Wire(b'{"a"', b":", b"1}").exchange().read_body() == b'{"a":1}'


async def test_a_client_that_leaves_while_sending() -> None:
    wire = Wire()
    wire.leave()
    with pytest.raises(ClientGone):
        await wire.exchange().read_body()


async def test_an_answer_has_its_length_and_is_json_unless_told() -> None:
    wire = Wire(b"")
    await wire.exchange().answer(b'{"a":1}', headers=[(b"x-localrun-request", b"req_1")])
    assert wire.status == 200
    assert wire.headers == {
        b"content-type": b"application/json",
        b"content-length": b"7",
        b"x-localrun-request": b"req_1",
        b"x-request-id": b"req_1",
    }
    other = Wire(b"")
    await other.exchange().answer(b"hi", headers=[(b"content-type", b"text/plain")])
    assert other.headers[b"content-type"] == b"text/plain"


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/api/chat", b"application/x-ndjson"),
        ("/v1/completions", b"text/event-stream"),
        ("/localrun/v1/events", b"text/event-stream"),
    ],
)
async def test_a_stream_has_the_family_s_type(path: str, content_type: bytes) -> None:
    wire = Wire(b"")
    exchange = wire.exchange(path)
    assert not exchange.started
    await exchange.open_stream()
    assert exchange.started
    await exchange.write(b"one\n")
    await exchange.close_stream(b"two\n")
    assert wire.headers[b"content-type"] == content_type
    assert wire.headers[b"x-accel-buffering"] == b"no", "nginx passes on what comes"
    assert wire.body == b"one\ntwo\n"
    assert [message.get("more_body") for message in wire.sent[1:]] == [True, False]


async def test_an_error_before_the_stream_has_a_status_and_after_it_an_event() -> None:
    wire = Wire(b"")
    await wire.exchange("/v1/completions").refuse(BadRequest("n: too many", field="n"))
    assert wire.status == 400
    assert json.loads(wire.body)["error"]["param"] == "n"

    broken = Wire(b"")
    exchange = broken.exchange("/api/chat")
    await exchange.open_stream()
    await exchange.write(b'{"done":false}\n')
    await exchange.refuse(EngineDied("the engine is gone"))
    assert broken.status == 200
    assert json.loads(broken.body.splitlines()[-1])["error"] == "the engine is gone"
    await exchange.refuse(EngineDied("again"))
    assert broken.body.count(b"error") == 1


async def test_a_client_that_leaves_cancels_the_handler_wherever_it_waits() -> None:
    wire = Wire(b"{}")
    exchange = wire.exchange()
    await exchange.read_body()
    cleaned_up = False

    async def handler() -> None:
        nonlocal cleaned_up
        async with exchange.while_connected():
            try:
                await asyncio.Event().wait()
            finally:
                cleaned_up = True

    handling = asyncio.create_task(handler())
    await asyncio.sleep(0)
    wire.leave()
    with pytest.raises(ClientGone):
        async with asyncio.timeout(60):
            await handling
    assert cleaned_up
    assert not wire.sent


async def test_the_end_of_the_answer_is_no_leaving() -> None:
    wire = Wire(b"{}")
    exchange = wire.exchange()
    await exchange.read_body()
    async with exchange.while_connected():
        await asyncio.sleep(0)
        await exchange.answer(b"{}")
        for _ in range(5):
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert wire.body == b"{}"


async def test_a_cancel_from_elsewhere_stays_a_cancel() -> None:
    wire = Wire(b"{}")
    exchange = wire.exchange()
    await exchange.read_body()

    async def handler() -> None:
        async with exchange.while_connected():
            await asyncio.Event().wait()

    handling = asyncio.create_task(handler())
    await asyncio.sleep(0)
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
    wire.leave()
    await asyncio.sleep(0)


def test_headers_are_found_by_name() -> None:
    exchange = Wire().exchange(headers=[(b"user-agent", b"x\xe9"), (b"user-agent", b"second")])
    assert exchange.header(b"user-agent") == "x\xe9"
    assert exchange.header(b"x-localrun-lane") == ""


PATHS = {"/api/chat": b" ", "/v1/chat/completions": b": ping\n\n", "/infill": b": ping\n\n"}


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages"])
async def test_a_silent_stream_says_that_it_is_alive_and_nothing_after_its_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "PING_AFTER_S", 0.01)
    wire = Wire(b"")
    exchange = Exchange({"path": path, "headers": []}, wire.receive, wire.send, shape_of(path))
    await exchange.read_body()
    async with exchange.while_connected():
        await exchange.open_stream()
        await until(lambda: len(wire.sent) > 3)
        await exchange.write(b"news")
        await exchange.close_stream(b"end")
        n_sent = len(wire.sent)
        await asyncio.sleep(0.03)
    assert len(wire.sent) == n_sent
    *pings, news, end = [message["body"] for message in wire.sent[1:]]
    assert set(pings) == {PATHS.get(path, b'event: ping\ndata: {"type":"ping"}\n\n')}
    assert (news, end) == (b"news", b"end")


async def test_a_stream_whose_client_has_gone_says_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PING_AFTER_S", 0.01)
    wire = Wire(b"")
    exchange = Exchange({"path": "/api/chat", "headers": []}, wire.receive, wire.send, Shape.OLLAMA)
    await exchange.read_body()

    async def stream() -> None:
        async with exchange.while_connected():
            await exchange.open_stream()
            wire.leave()
            await asyncio.sleep(10)

    with pytest.raises(ClientGone):
        await stream()
    n_sent = len(wire.sent)
    await asyncio.sleep(0.03)
    assert len(wire.sent) == n_sent


NO_RUNTIME = cast(Runtime, SimpleNamespace(settings=Settings()))
SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/api/chat", "headers": []}


async def _receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def run(handler: Handler) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await Endpoint(partial(handler, NO_RUNTIME), "/api/chat")(dict(SCOPE), _receive, send)
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


async def test_what_is_wrong_with_the_disk_is_told_to_the_client(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(_: Runtime, __: Exchange) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/data/models")

    with caplog.at_level(logging.CRITICAL):
        sent = await run(handler)
    assert sent[0]["status"] == 500
    assert says(error_of(sent), "/data/models", "Read-only file system")


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

    serving = asyncio.create_task(Endpoint(partial(handler, NO_RUNTIME), "/api/chat")(dict(SCOPE), _receive, send))
    await streaming.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert "stopping" in error_of(sent)


class Inner(msgspec.Struct):
    k: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1


class Outer(msgspec.Struct):
    name: str
    inner: Inner | None = None
    items: list[Inner] = []


def test_unknown_fields_are_ignored() -> None:
    body = decode_body(b'{"name": "a", "other": {"deep": [1, 2.5, null]}, "inner": {"k": 3, "x": 1}}', Outer)
    assert body.name == "a"
    assert body.inner is not None
    assert body.inner.k == 3


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        (b"{}", "name", "name is required"),
        (b'{"name": 1}', "name", "expected `str`, got `int`"),
        (b'{"name": "a", "inner": {"k": 0}}', "inner.k", ">= 1"),
        (b'{"name": "a", "inner": {"k": 1.5}}', "inner.k", "`float`"),
        (b'{"name": "a", "inner": {"k": 9223372036854775808000}}', "inner.k", "<= 100"),
        (b'{"name": "a", "items": [{}, {"k": "x"}]}', "items[1].k", "got `str`"),
    ],
)
def test_what_is_out_of_shape_is_named(text: bytes, field: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_body(text, Outer)
    assert caught.value.field == field
    assert said in caught.value.message
    assert field in caught.value.message


def test_a_wrong_value_is_not_said_at_any_length() -> None:
    with pytest.raises(BadRequest) as caught:
        decode_body(b'"' + b"x" * 100_000 + b'"', Literal["on", "off"])
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "text",
    [
        b"", b"  \n", b"{", b"[]", b"null", b'"text"', b'{"name": "a"} trailing', b"{'name': 'a'}", b'{"name": "a",}',
        b'{"name": "a", "x": NaN}', b'{"name": "a", "x": -Infinity}',
        b'{"name": "\xff"}', b'{"name": "a", "x": "\xc3"}',
        b'\xef\xbb\xbf{"name": "a"}', '{"name": "a"}'.encode("utf-16"),
        b'{"name": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"name": "a", "x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b'{"name": "a", "inner": {"k": ' + b"9" * 5000 + b"}}",
    ],
)  # fmt: skip
def test_what_is_not_plain_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_body(text, Outer)


def test_whole_characters_written_as_escapes_pass() -> None:
    assert decode_body(b'{"name": "\\ud83d\\ude00"}', Outer).name == "\U0001f600"


@pytest.mark.parametrize(
    ("escaped", "read"),
    [
        (r"x\ud83d", "x\ufffd"), (r"\ude00x", "\ufffdx"), (r"\ud83d or so", "\ufffd or so"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"), (r"\ud83d\ude00\ude00", "\U0001f600\ufffd"),
        (r"\\ud83d \uD83D", "\\ud83d \ufffd"), (r"\\\ud83d", "\\\ufffd"), (r"\"\ud83d\"", '"\ufffd"'),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_read_as_one_odd_character(escaped: str, read: str) -> None:
    """JavaScript writes it where a text was cut inside an emoji, and a client that keeps its conversation sends it
    for ever."""
    assert decode_body(b'{"name": "%b"}' % escaped.encode(), Outer).name == read


def test_of_a_key_that_occurs_twice_the_last_one_counts() -> None:
    assert decode_body(b'{"name": "a", "other": {"q": 1, "q": 2}, "name": "b"}', Outer).name == "b"


async def test_a_large_body_is_looked_at_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noting(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return decode_body(*arguments)

    monkeypatch.setattr(exchange_module, "decode_body", noting)
    text = b'{"name": "a", "other": [' + b",".join([b'{"k": 1}'] * 90_000) + b"]}"
    sent = [{"type": "http.request", "body": text, "more_body": False}]

    async def receive() -> Any:
        return sent.pop()

    async def send(_: Any) -> None:
        raise AssertionError

    read = await Exchange({"path": "/api/chat"}, receive, send, Shape.OLLAMA).read_json(Outer)
    assert read.name == "a"
    assert threads != [threading.main_thread()]


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        (b"[" + b"1," * (MAX_VALUES - 1) + b"1]", False),
        (b"[" + b"1," * MAX_VALUES + b"1]", True),
        (b"[" + b"[]," * MAX_VALUES + b"[]]", True),
        (b"{" + b'"a\\"":1,' * (2 * MAX_VALUES) + b'"b":1}', True),
        (b'["' + b"a, [b] {c} " * MAX_VALUES + b'"]', False),
        (b'["' + b'\\", ' * MAX_VALUES + b'"]', False),
        (b'["' + b"\\\\" * 99 + b'",' + b"1," * MAX_VALUES + b"1]", True),
        (b"[" + b'{"role":"user","content":"a, b"},' * 32_768 + b"1]", False),
        (b'["' + b'\\"' * 9 + b"," * 2 * MAX_VALUES, False),  # no JSON, as the parser says then
    ],
    ids=range(9),
)
def test_values_are_counted_before_they_are_made(text: bytes, is_refused: bool) -> None:
    """A body of 28 MB can have ten million of them, which take seconds and a gigabyte."""
    try:
        decode_body(text, Any)
        code = ""
    except (BadRequest, TooLarge) as error:
        code = error.code
    assert (code == TooLarge.code) is is_refused
