"""The lean HTTP client: how answers end, and what their errors say."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from localrun.bench.wire_client import Refused, post_stream
from localrun.errors import LocalrunError

URL = "/v1/completions"


def answered(raw: bytes) -> bytes:
    """What a POST gets from a server that sends these bytes and closes the connection. Raises what it raises."""
    got = b""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(raw)
        connection.close()

    def take(data: bytes, _now_s: float) -> None:
        nonlocal got
        got += data

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            asyncio.run(post_stream(f"http://127.0.0.1:{listener.getsockname()[1]}{URL}", b"{}", take))
        finally:
            thread.join()
    return got


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
    ],
)
def test_an_answer_may_end_by_length_by_chunk_or_by_closing(raw: bytes) -> None:
    assert answered(raw) == b"hello"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_an_error(raw: bytes) -> None:
    with pytest.raises(LocalrunError, match="broke before the answer was complete"):
        answered(raw)


def test_what_is_not_http_is_said() -> None:
    with pytest.raises(LocalrunError, match="not HTTP"):
        answered(b"220 smtp ready\r\n")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "status 400: too long"),
        (b'{"error": "too long"}', "status 400: too long"),
        (b"Bad Request", "status 400: Bad Request"),
        (b'["odd"]', 'status 400: ["odd"]'),
    ],
)
def test_a_refusal_says_the_server_s_reason(body: bytes, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        answered(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert (caught.value.http_status, caught.value.message, caught.value.retry_after_s) == (400, reason, None)


@pytest.mark.parametrize(("header", "seconds"), [(b"7", 7.0), (b"Wed, 21 Oct 2026 07:28:00 GMT", None)])
def test_when_to_come_back_is_read_where_it_is_a_number(header: bytes, seconds: float | None) -> None:
    with pytest.raises(Refused) as caught:
        answered(b"HTTP/1.1 429 Busy\r\nRetry-After: %b\r\nContent-Length: 0\r\n\r\n" % header)
    assert caught.value.retry_after_s == seconds
