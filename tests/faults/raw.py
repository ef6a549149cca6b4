"""Requests as bytes, for those that no HTTP client would send: `raw.ask(daemon, raw.head("POST", "/x"), b"{}")`."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import NamedTuple

import psutil

from tests.daemon import Daemon

JSON = "Content-Type: application/json"
# How long an answer may take, on a machine that is busy with other tests.
PATIENCE_S = 60.0


class Answer(NamedTuple):
    """Status 0 stands for a connection that was closed without an answer."""

    status: int
    head: str
    body: bytes


def head(method: str, path: str, *headers: str, host: str = "localhost", length: int | None = None) -> bytes:
    """With `Connection: close`, so that the answer's end is the connection's."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def post(path: str, body: object) -> bytes:
    """A whole JSON request."""
    content = json.dumps(body).encode()
    return head("POST", path, JSON, length=len(content)) + content


def connect(daemon: Daemon, port: int | None = None) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port or daemon.port), timeout=PATIENCE_S)


def ask(daemon: Daemon, *pieces: bytes, port: int | None = None) -> Answer:
    """Sends the pieces until the daemon closes, and returns its answer."""
    with connect(daemon, port) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        return answer_of(read(connection, is_one=True))


def read(connection: socket.socket, *, is_one: bool = False) -> bytes:
    """All that comes until the daemon closes or resets the connection, or if `is_one` until an answer has its length:
    a connection whose request was refused half way is closed later."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
            start, end, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)", start, re.IGNORECASE)
            if is_one and end and length and len(body) >= int(length[1]):
                break
    return received


def answer_of(received: bytes) -> Answer:
    if not received:
        return Answer(0, "", b"")
    start, _, body = received.partition(b"\r\n\r\n")
    text = start.decode("latin-1")
    return Answer(int(text.split()[1]), text.lower(), body)


def rss_bytes(daemon: Daemon) -> int:
    """Memory of the daemon's own process."""
    return int(psutil.Process(daemon.process.pid).memory_info().rss)
