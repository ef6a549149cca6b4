"""What a server over HTTP may not do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from localrun.tools.config import ServerSettings
from localrun.tools.servers import MAX_MESSAGE_BYTES, ServerFailed, Servers


class _Handler(BaseHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.asked.append(self.path)
        # Else the connection is reset with its end, and what was sent before may be lost.
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/elsewhere"):
            self.send_response(307)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/stolen")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if self.path.startswith("/packed"):
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with suppress(OSError):
            for _ in range(2 * MAX_MESSAGE_BYTES // 65536 if self.path.startswith("/endless") else 1):
                self.wfile.write(b" " * 65536)


@contextmanager
def _server() -> Iterator[tuple[str, list[str]]]:
    handler = type("Handler", (_Handler,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/endless", "more than 32 MB"), ("/packed", "compressed"), ("/elsewhere", "not followed"), ("/none", "parse")],
)
def test_what_it_may_not_do_is_said_without_what_is_secret(path: str, reason: str) -> None:
    async def failure(url: str) -> str:
        servers = Servers({"web": ServerSettings(url=f"{url}{path}?key=SECRET")})
        try:
            with pytest.raises(ServerFailed) as raised:
                await servers.tools("web")
        finally:
            await servers.close()
        return raised.value.message

    with _server() as (url, asked):
        said = asyncio.run(failure(url))
        assert reason in said
        assert said.startswith(f"the server web cannot be reached at {url.removeprefix('http://')}: ")
        assert "SECRET" not in said
        assert not any("stolen" in path for path in asked)
