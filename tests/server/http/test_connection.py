"""Deadlines and bounds of one connection, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from localrun.config import ConfigError
from localrun.errors import PortBusy
from localrun.server.http import connection
from localrun.server.http.connection import MAX_HEAD_BYTES, MAX_HEADER_FIELDS, BoundedConnection, bind, listen, url_of
from localrun.server.openapi.operations import find

DEADLINE_S = 0.3
# How long a test waits for what must happen; far beyond the deadline, for a machine that does other things too.
PATIENCE_S = 60.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message["body"])
        more = message["more_body"]
    body = str(length).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app: ASGIApp = echo, deadline_s: float = DEADLINE_S) -> AsyncIterator[int]:
    """A server on a free port."""
    config = uvicorn.Config(
        app, port=0, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1,
        http=partial(BoundedConnection, deadline_s=deadline_s, find=find),  # type: ignore[arg-type]
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def exchange(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the pieces and reads until the server closes, whatever it thinks of us."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
        received = b""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    received += data
        return received
    finally:
        writer.close()


HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


async def test_a_request_in_time_is_answered_and_the_connection_goes_on() -> None:
    async with serving() as port:
        answer = await exchange(
            port, HEAD + b"content-length: 3\r\n\r\nabc", HEAD + b"content-length: 0\r\nconnection: close\r\n\r\n"
        )
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"\r\n\r\n3HTTP" in answer


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one ", b"two ", b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    async with serving(stream) as port:
        head, _, body = (await exchange(port, b"GET / HTTP/1.0\r\nhost: localhost\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b"one two "
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
    async with serving() as port:
        answer = await exchange(port, b"POST / HTTP/1.0\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc")
        assert b"content-length: 1\r\n" in answer
        assert answer.endswith(b"\r\n\r\n3")


async def test_who_asks_to_keep_the_connection_is_told_how_long_it_is_kept() -> None:
    asked = b"host: localhost\r\nconnection: Keep-Alive\r\ncontent-length: 0\r\n\r\n"
    last = HEAD + b"content-length: 0\r\nconnection: close\r\n\r\n"
    kept = b"connection: keep-alive\r\nkeep-alive: timeout=5\r\n"  # uvicorn's usual time
    async with serving() as port:
        for version in (b"1.0", b"1.1"):
            answer = await exchange(port, b"POST / HTTP/" + version + b"\r\n" + asked, last)
            assert (answer.count(b"200 OK"), answer.count(kept), answer.count(b"keep-alive:")) == (2, 1, 1)
        assert b"keep-alive" not in await exchange(port, HEAD + b"content-length: 0\r\n\r\n", last)


async def test_an_answer_of_unknown_length_ends_with_the_connection_of_http_1_0_also_if_that_was_to_be_kept() -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": False})

    async with serving(stream) as port:
        answer = await exchange(port, b"GET / HTTP/1.0\r\nhost: localhost\r\nconnection: keep-alive\r\n\r\n")
    assert (b"keep-alive" in answer, answer.endswith(b"\r\n\r\none")) == (False, True)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", b""),
        (b"\r\n", b"HTTP/1.1 408 "),
        (b"POST / HT", b"HTTP/1.1 408 "),
        (HEAD, b"HTTP/1.1 408 "),
        (HEAD + b"content-length: 10\r\n\r\nabc", b""),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b""),
    ],
    ids=["nothing", "an empty line", "half a line", "half a head", "half a body", "half a chunked body"],
)
async def test_a_request_that_does_not_arrive_in_time_is_closed(sent: bytes, expected: bytes) -> None:
    async with serving() as port:
        answer = await exchange(port, sent)
    assert answer.startswith(expected) if expected else answer == b""


async def test_a_byte_now_and_then_does_not_keep_a_connection() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"x: ")
        closed = asyncio.create_task(reader.read())
        async with asyncio.timeout(PATIENCE_S):
            while not closed.done():
                writer.write(b"x")
                await asyncio.sleep(DEADLINE_S / 10)
        writer.close()
    assert b"200 OK" not in await closed


async def test_who_wants_tls_is_told_at_once_that_there_is_none() -> None:
    async with serving(deadline_s=1000.0) as port:
        assert (await exchange(port, b"\x16\x03\x01\x02\x00\x01" + bytes(500))).startswith(b"HTTP/1.1 400 ")


async def test_an_uploaded_file_may_take_its_time_as_long_as_it_comes() -> None:
    head = b"POST /api/blobs/sha256:0 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 30\r\n\r\n"
    async with serving(deadline_s=1.0) as port:
        # Half as long again as the deadline, in pauses of a twentieth.
        answer = await exchange(port, head, *[b"x"] * 30, pause_s=0.05)
    assert answer.endswith(b"\r\n\r\n30")
    async with serving() as port:
        assert await exchange(port, head, b"x") == b""


async def test_the_deadline_starts_again_with_each_request_and_not_while_an_answer_is_due() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.sleep(3 * DEADLINE_S)
        await echo(scope, receive=_empty, send=send)

    async with serving(slow) as port:
        request = HEAD + b"content-length: 0\r\n\r\n"
        last = HEAD + b"content-length: 0\r\nconnection: close\r\n\r\n"
        answer = await exchange(port, request, last, pause_s=4 * DEADLINE_S)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_a_pipelined_request_waits_for_the_answer_before_it() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(2 * DEADLINE_S)
        await echo(scope, receive, send)

    async with serving(slow) as port:
        last = HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nab"
        answer = await exchange(port, HEAD + b"content-length: 0\r\n\r\n" + last[:-1], last[-1:])
    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("n_last", range(1, 30))
async def test_a_pipelined_request_may_be_split_anywhere(n_last: int) -> None:
    requests = HEAD + b"content-length: 1\r\n\r\na" + HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nab"
    async with serving() as port:
        answer = await exchange(port, requests[:-n_last], requests[-n_last:], pause_s=0.01)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.endswith(b"\r\n\r\n2")


@pytest.mark.parametrize("n_last", [0, *range(1, 60)])
async def test_an_offer_of_an_upgrade_is_passed_over_in_every_request_of_a_connection(n_last: int) -> None:
    offer = b"connection: Upgrade\r\nUpgrade: h2c\r\n"
    requests = (
        HEAD + offer + b"content-length: 13\r\n\r\na\r\nupgrade: b" + HEAD + offer + b"content-length: 2\r\n\r\nab"
    )
    requests += HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n"
    at = len(requests) - n_last - 40
    async with serving() as port:
        answer = await exchange(port, requests[:at], requests[at:], pause_s=0.01)
    assert [part.rpartition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == [b"13", b"2", b"0"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD + b"x: " + b"a" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        HEAD + b"x: " + b"a" * (64 * MAX_HEAD_BYTES),
        HEAD + b"x-y: 1\r\n" * 10_000 + b"\r\n",
        HEAD + b"x-y: 1\r\n" * (MAX_HEADER_FIELDS + 1) + b"\r\n",
    ],
    ids=["a long path", "a long header", "an endless header", "10,000 headers", "one header too many"],
)
async def test_a_head_over_its_bounds_gets_431(head: bytes) -> None:
    async with serving(deadline_s=PATIENCE_S) as port:
        answer = await exchange(port, head)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""  # reset: we were still sending when it closed
    assert b"200" not in answer


async def test_a_head_within_its_bounds_passes() -> None:
    head = HEAD + b"x-y: 1\r\n" * (MAX_HEADER_FIELDS - 4) + b"x: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    async with serving() as port:
        answer = await exchange(port, head + b"content-length: 1\r\nconnection: close\r\n\r\nx")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "headers",
    [
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"content-length: -1\r\n\r\n",
        b"content-length: 99999999999999999999999\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    ],
)
async def test_ambiguous_lengths_are_never_handled(headers: bytes) -> None:
    async with serving() as port:
        answer = await exchange(port, HEAD + headers)
    assert b"200 OK" not in answer


async def test_an_upgrade_that_we_do_not_speak_is_ignored() -> None:
    """Java's HTTP client offers h2c with every request."""
    upgrade = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n"
    async with serving() as port:
        answer = await exchange(
            port, upgrade + b"content-length: 3\r\n\r\nabc", HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nab",
            pause_s=0.1,
        )  # fmt: skip
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"\r\n\r\n3HTTP" in answer
    assert answer.endswith(b"\r\n\r\n2")


async def test_more_connections_than_may_be_are_refused_until_others_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 2)
    request = HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nab"
    async with serving(deadline_s=PATIENCE_S) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        refused = await exchange(port, request)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"close some" in refused
        assert await exchange(port) == b"", "one that sends nothing is closed as well"
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while not (await exchange(port, request)).startswith(b"HTTP/1.1 200 "):
                pass


async def test_of_too_many_connections_the_one_idle_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)

    async def ask(client: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
        client[1].write(HEAD + b"content-length: 2\r\n\r\nab")
        return await client[0].readuntil(b"\r\n\r\n2")

    async with serving(deadline_s=PATIENCE_S) as port, asyncio.timeout(PATIENCE_S):
        silent, first, second = clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for client in (second, first, second):
            assert (await ask(client)).startswith(b"HTTP/1.1 200 ")
        clients.append(await asyncio.open_connection("127.0.0.1", port))
        assert (await ask(clients[-1])).startswith(b"HTTP/1.1 200 ")
        assert await first[0].read() == b"", "closed"
        for client in (silent, second):
            assert (await ask(client)).startswith(b"HTTP/1.1 200 ")
        for _, writer in clients:
            writer.close()


async def test_a_client_that_accepts_no_output_is_cut_off() -> None:
    """Without the cut the handler would wait for ever, and hold its model."""
    ended = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        ended.set()

    async with serving(endless) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(HEAD + b"content-length: 0\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
        writer.close()


async def _empty() -> dict[str, object]:
    return {"type": "http.request", "body": b"", "more_body": False}


def test_port_zero_takes_a_free_one() -> None:
    with closing(bind("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(listening) == f"http://127.0.0.1:{port}"
        with closing(socket.create_connection(("127.0.0.1", port), timeout=60)):
            pass


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2"])
def test_loopback_addresses(host: str) -> None:
    bind(host, 0).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid", "", "127.0.0.1.evil.invalid"])
def test_addresses_of_others_are_refused_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host is|cannot listen on 192"):
        listen(host, 0)


def test_all_addresses_and_loopback_have_sockets_of_their_own_at_one_port() -> None:
    with closing(listen("0.0.0.0", 0)) as both:
        assert both.outside is not None
        port = both.outside.getsockname()[1]
        assert both.local.getsockname() == ("127.0.0.1", port)
        with closing(socket.create_connection(("127.0.0.1", port), timeout=60)):
            accepted, _ = _accept(both.local)
            accepted.close()
        with closing(socket.create_connection(("127.0.0.2", port), timeout=60)):
            accepted, _ = _accept(both.outside)
            accepted.close()
        for busy in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(PortBusy):
                listen(busy, port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="IPv6")
def test_of_both_versions_this_machine_s_loopback_is_its_own() -> None:
    """`localhost` is `::1` first."""
    with closing(listen("::", 0)) as both:
        assert both.outside is not None
        assert both.local_v6 is not None
        port = both.outside.getsockname()[1]
        for host, wanted in (("127.0.0.1", both.local), ("::1", both.local_v6), ("127.0.0.2", both.outside)):
            with closing(socket.create_connection((host, port), timeout=10)):
                accepted, _ = _accept(wanted)
                accepted.close()


def _accept(listening: socket.socket) -> tuple[socket.socket, object]:
    listening.settimeout(PATIENCE_S)
    return listening.accept()


def test_a_busy_port_names_itself_and_the_way_out() -> None:
    with closing(bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortBusy, match=rf"port {port} .*--port"):
            bind("127.0.0.1", port)


def test_a_port_whose_daemon_has_just_ended_is_tried_again_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There its connections keep it for a while, though nobody listens."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            kept.close()

    monkeypatch.setattr(connection.time, "sleep", sleep)
    with closing(bind("127.0.0.1", port)) as again:
        assert again.getsockname()[1] == port
        assert len(pauses) == 3
        with pytest.raises(PortBusy):
            bind("127.0.0.1", port)
    assert sum(pauses) < 5, "another program's stays"


def test_a_port_that_windows_keeps_for_itself_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    refused = connection._cannot_listen(OSError(errno.EACCES, "forbidden"), "127.0.0.1", 11434)
    assert isinstance(refused, PortBusy)
    assert "excludedportrange" in refused.message
    assert "--port" in refused.message


class GoneError(OSError):
    winerror = 64  # the network name is no longer available


async def test_clients_that_leave_before_they_are_accepted_do_not_end_the_listening_on_windows() -> None:
    """Its loop closes the socket when a call of the proactor's `accept` fails."""
    ends: list[BaseException | str] = [GoneError(), GoneError(), "a client", OSError(9, "closed")]

    async def accept(listening: object) -> str:
        await asyncio.sleep(0)
        end = ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end

    loop = SimpleNamespace(_proactor=SimpleNamespace(accept=accept), create_task=asyncio.get_running_loop().create_task)
    connection.keep_accepting(loop)  # type: ignore[arg-type]
    assert await loop._proactor.accept(None) == "a client"
    with pytest.raises(OSError, match="closed"):
        await loop._proactor.accept(None)
    connection.keep_accepting(asyncio.get_running_loop())  # which has none


def test_ipv6_has_brackets_in_its_url() -> None:
    try:
        listening = bind("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    with closing(listening):
        assert url_of(listening).startswith("http://[::1]:")


# --- what comes in a body and is none of it -----------------------------------------------------------------------

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nx: " + b"y" * 65_536, b"0\r\n" + b"x: y\r\n" * 10_000, b"2;x=" + b"y" * 65_536],
    ids=["one trailer", "many trailers", "an extension"],
)
async def test_what_is_beside_a_body_has_an_end(endless: bytes) -> None:
    """It cost seconds of the event loop, or hundreds of megabytes, and no key."""
    async with serving(deadline_s=PATIENCE_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED)
        n_sent = 0
        with contextlib.suppress(ConnectionError):
            while n_sent < 64 * 2**20:
                writer.write(endless if n_sent == 0 else endless[-60_000:])
                n_sent += 60_000
                await writer.drain()
        assert n_sent < 8 * 2**20, "the sockets' buffers, and little more"
        with contextlib.suppress(ConnectionError):
            assert (await reader.read()).startswith(b"HTTP/1.1 431")
        writer.close()


async def test_small_chunks_and_a_few_trailers_are_fine() -> None:
    chunks = b"".join(b"1;name=value\r\nx\r\n" for _ in range(20_000))
    head = CHUNKED.removesuffix(b"2\r\n{}\r\n")
    async with serving(deadline_s=PATIENCE_S) as port:
        answer = await exchange(port, head + chunks + b"0\r\nX-Checksum: 1\r\nX-More: 2\r\n\r\n")
        assert answer.endswith(b"20000")


async def test_trailers_are_no_headers() -> None:
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        seen.extend(name for name, _ in scope["headers"])

    async with serving(app, deadline_s=PATIENCE_S) as port:
        await exchange(port, CHUNKED, b"0\r\nHost: evil\r\nAuthorization: Bearer x\r\n\r\n", pause_s=0.1)
    assert seen == [b"host", b"transfer-encoding"]
