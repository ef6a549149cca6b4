"""A daemon that a test scripts, on a real port, and the command line run against it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localrun.cli import root

VERSION = "9.8.7"
MODEL_ROW = {
    "name": "tiny",
    "digest": "sha256:0123456789abcdef",
    "size": 9_500_000,
    "modified_at": "2020-01-02T03:04:05.123456789Z",
}
SHOWN = {
    "details": {"parameter_size": "2.4M", "quantization_level": "Q8_0"},
    "model_info": {"general.architecture": "llama", "llama.context_length": 4096, "llama.embedding_length": 192},
    "capabilities": ["completion"],
    "parameters": "temperature 0.7",
    "template": "{{ messages }}\x1b[31m",
}
ENGINE = {"model": "tiny", "pid": 4242, "state": "ready", "slots": 8, "kv_cells": 8192, "size_bytes": 12_000_000}
SNAPSHOT = {
    "time_s": 1.0, "uptime_s": 1.0, "version": VERSION, "aggregate": {}, "engines": [ENGINE], "requests": [],
    "system": {},
}  # fmt: skip
CACHE = {
    "models": [
        {"model": "tiny", "pid": 4242, "kv_cells": 8192, "kv_cells_used": 100, "ram_bytes": 1_500_000, "ram_entries": 3,
         "disk_bytes": 4_000_000, "disk_entries": 7, "disk_used_at_s": 1.0, "hit_rate": 0.5},
        {"model": "other", "disk_bytes": 0},
    ],
    "ram_bytes": 1_500_000, "ram_limit_bytes": 0, "disk_bytes": 4_000_000, "disk_limit_bytes": 9_000_000,
    "disk_folder": "/some/kv",
}  # fmt: skip
METRICS = {
    "prompt_eval_count": 26, "prompt_eval_cached_count": 10, "eval_count": 5, "load_duration": 2_000_000,
    "prompt_eval_duration": 100_000_000, "eval_duration": 80_000_000, "total_duration": 200_000_000,
}  # fmt: skip


class FakeDaemon(ThreadingHTTPServer):
    """Answers every chat with `words`, one a line. `bodies` are the requests that came; with `hold` set a chat never
    ends after its words, until the client goes away, which sets `left`; a `refusal` is the answer to every chat."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.words = ["Hello", " there", "."]
        self.done_reason = "stop"
        self.root = b"welcome"
        self.health: tuple[int, dict[str, Any], dict[str, str]] = (200, {"status": "ok", "version": VERSION}, {})
        self.bodies: list[tuple[str, Any]] = []
        self.refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self.hold = False
        self.answers: dict[str, object] = {}
        self.shown: dict[str, object] = SHOWN
        self.left = threading.Event()
        self.is_gone = False

    def leave(self) -> None:
        """Listen no more, and answer nothing on connections that are open."""
        self.is_gone = True
        self.shutdown()
        self.server_close()

    @property
    def chats(self) -> list[Any]:
        """The bodies of the chats among `bodies`."""
        return [body for path, body in self.bodies if path == "/api/chat"]

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeDaemon

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Say nothing."""

    def do_GET(self) -> None:
        pages: dict[str, object] = {
            "/api/tags": {"models": [MODEL_ROW]},
            "/api/ps": {"models": [MODEL_ROW]},
            "/localrun/v1/snapshot": SNAPSHOT,
            "/localrun/v1/cache": CACHE,
            **self.server.answers,
        }
        if self.path == "/health":
            self._answer(*self.server.health)
        elif self.path == "/":
            self._answer(200, self.server.root.decode(), {})
        elif self.path in pages:
            self._answer(200, pages[self.path], {})
        elif self.path.startswith("/localrun/v1/catalog"):
            self._answer(200, {"models": []}, {})
        else:
            self._answer(404, {"error": "no such page"}, {})

    def do_DELETE(self) -> None:
        self.server.bodies.append((self.path, None))
        cleared = {"ram_bytes": 1_500_000, "disk_bytes": 4_000_000}
        self._answer(200, self.server.answers.get(self.path, cleared), {})

    def do_POST(self) -> None:
        if self.server.is_gone:
            self.close_connection = True
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        if body.get("model") == "missing":
            self._answer(404, {"error": "model 'missing' not found"}, {"X-Localrun-Error": "model_not_found"})
        elif self.path == "/api/chat" and self.server.refusal is not None:
            self._answer(*self.server.refusal)
        elif self.path == "/api/chat":
            self._chat()
        elif self.path == "/api/show":
            self._answer(200, self.server.shown, {})
        elif self.path == "/localrun/v1/shutdown":
            self._answer(200, {"status": "stopping"}, {"Connection": "close"})
            threading.Thread(target=self._end).start()
        else:
            self._answer(200, {"done": True}, {})

    def _end(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _answer(self, status: int, content: object, headers: dict[str, str]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _chat(self) -> None:
        self.send_response(200)
        self.send_header("X-Localrun-Request", "req_7")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for word in self.server.words:
            self._line({"message": {"role": "assistant", "content": word}, "done": False})
        if self.server.hold:
            self.connection.recv(1)  # ends when the client closes its side
            self.server.left.set()
            self.close_connection = True
            return
        self._line({"message": {"content": ""}, "done": True, "done_reason": self.server.done_reason, **METRICS})
        self.wfile.write(b"0\r\n\r\n")

    def _line(self, value: object) -> None:
        data = json.dumps(value).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """A scripted daemon that is listening."""
    server = FakeDaemon()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without the user's own settings, for this process and for children."""
    for name in [name for name in os.environ if name.startswith(("LOCALRUN_", "OLLAMA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path / "home"))
    return dict(os.environ)


Localrun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def localrun(environment: dict[str, str], tmp_path: Path) -> Localrun:
    """Runs the command line as in a process of its own, with its own environment and streams, but in this one: a
    hundred interpreters take half a minute. `stdin` is what is piped in; None is the null device."""

    def run(
        *arguments: str, stdin: str | bytes | None = None, port: int | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        feed = Path(os.devnull)
        if stdin is not None:
            feed = tmp_path / "stdin"
            feed.write_bytes(stdin.encode("utf-8") if isinstance(stdin, str) else stdin)
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with feed.open(encoding="utf-8") as source, pytest.MonkeyPatch.context() as patch:
            for name in os.environ.keys() - environment.keys():
                patch.delenv(name)
            for name, value in (environment | ({} if port is None else {"LOCALRUN_PORT": str(port)})).items():
                patch.setenv(name, value)
            for name, stream in (("stdin", source), ("stdout", out), ("stderr", err)):
                patch.setattr(sys, name, stream)
            if cwd is not None:
                patch.chdir(cwd)
            code = root.run(arguments)
        return subprocess.CompletedProcess(arguments, code, _text(out), _text(err))

    return run


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    written = stream.buffer
    assert isinstance(written, io.BytesIO)
    return written.getvalue().decode()


@pytest.fixture
def program(environment: dict[str, str]) -> Localrun:
    """`localrun` in a process of its own, for commands that start or end processes or take signals."""

    def run(*arguments: str, port: int | None = None) -> subprocess.CompletedProcess[str]:
        variables = environment | ({} if port is None else {"LOCALRUN_PORT": str(port)})
        return subprocess.run(
            [sys.executable, "-m", "localrun", *arguments], capture_output=True, text=True, env=variables, check=False,
            timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run
