"""The postcondition itself: it holds where nothing happened, and sees each kind of harm."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.daemon import Daemon, running_daemon
from tests.faults import postcondition
from tests.faults.postcondition import unfinished_files, unharmed


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10") as daemon:
        yield daemon


def test_answers_and_cancelled_answers_are_no_harm(daemon: Daemon) -> None:
    with unharmed(daemon):
        body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 1000, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        assert daemon.post("/v1/completions", model="tiny", prompt="y", max_tokens=3).status_code == 200


kept: list[socket.socket] = []


def leave_a_file(daemon: Daemon) -> None:
    with unharmed(daemon):
        (daemon.home / ".1-0123456789abcdef.localrun-temp").touch()


def leave_a_connection(daemon: Daemon) -> None:
    with unharmed(daemon):
        _leave(daemon, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")


def leave_a_request(daemon: Daemon) -> None:
    body = b'{"model": "tiny", "prompt": "x", "stream": true, "max_tokens": 1900, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with unharmed(daemon):
        _leave(daemon, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert kept[-1].recv(1)


def _leave(daemon: Daemon, sent: bytes) -> None:
    kept.append(socket.create_connection(("127.0.0.1", daemon.port)))
    kept[-1].sendall(sent)


@pytest.mark.parametrize(
    ("leave", "seen"),
    [(leave_a_file, "localrun-temp"), (leave_a_connection, "n_descriptors"), (leave_a_request, "no request under way")],
)
def test_what_is_left_is_seen(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, leave: Callable[[Daemon], None], seen: str
) -> None:
    monkeypatch.setattr(postcondition, "PATIENCE_S", 2.0)
    with pytest.raises(AssertionError, match=seen):
        leave(daemon)
    while kept:
        kept.pop().close()
    for path in unfinished_files(daemon.home):
        path.unlink()
