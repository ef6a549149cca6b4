"""A completion server that a test scripts, on a real port, in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from localrun.bench.results import Target


@dataclass
class Reply:
    """`pieces` are (seconds to wait, text). An answer that `breaks` closes its connection after them; without `usage`
    no counts are sent."""

    pieces: Iterable[tuple[float, str]] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "not today"
    n_output: int | None = None
    n_cached: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    usage: bool = True
    breaks: bool = False


@dataclass
class Asked:
    body: dict[str, Any]
    headers: dict[str, str]


class FakeServer(ThreadingHTTPServer):
    """Answers with as many pieces as tokens were asked for, at once, unless `reply` says otherwise. `asked` are the
    requests that came."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Callable[[Asked], Reply] = lambda asked: Reply([(0.0, "x")] * asked.body["max_tokens"])
        self.pages: dict[str, object] = {}
        self.asked: list[Asked] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def target(self) -> Target:
        return Target("fake", self.url, "model")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Say nothing."""

    def do_GET(self) -> None:
        found = self.path in self.server.pages
        self._answer(200 if found else 404, self.server.pages.get(self.path, {}), {})

    def do_POST(self) -> None:
        asked = Asked(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), dict(self.headers))
        self.server.asked.append(asked)
        reply = self.server.reply(asked)
        if reply.status != 200:
            self._answer(reply.status, {"error": {"message": reply.message}}, reply.headers)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(asked, reply)
        except ConnectionError:
            self.close_connection = True  # the client has seen enough

    def _stream(self, asked: Asked, reply: Reply) -> None:
        n_pieces = 0
        for pause_s, text in reply.pieces:
            time.sleep(pause_s)
            is_chat = self.path == "/v1/chat/completions"
            self._event({"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
            n_pieces += 1
        if reply.breaks:
            self.close_connection = True
            return
        if reply.usage:
            n_output = n_pieces if reply.n_output is None else reply.n_output
            details = {"cached_tokens": reply.n_cached}
            n_prompt = len(asked.body.get("prompt", ""))
            usage = {"prompt_tokens": n_prompt, "completion_tokens": n_output, "prompt_tokens_details": details}
            timings = {"draft_n": reply.n_drafted, "draft_n_accepted": reply.n_accepted} if reply.n_drafted else {}
            self._event({"choices": [], "usage": usage, "timings": timings})
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: object) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, content: object, headers: dict[str, str]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A scripted server that is listening."""
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()
    thread.join()
