"""Searches of a hub that hangs, in a real daemon."""

from __future__ import annotations

import socket
import time

from tests.daemon import running_daemon
from tests.hub.hanging import HangingHub

N_SEARCHES = 40


def test_abandoned_searches_keep_neither_requests_nor_the_end_waiting() -> None:
    with HangingHub() as hub, running_daemon(HF_ENDPOINT=hub.endpoint) as daemon:
        for number in range(N_SEARCHES):
            with socket.create_connection(("127.0.0.1", daemon.port)) as client:
                query = f"/localrun/v1/search?query=fox{number}"
                client.sendall(f"GET {query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                deadline_s = time.monotonic() + 30
                while not hub.connections:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
        daemon.http.timeout = 10.0
        assert daemon.post("/api/chat", model="tiny", messages=[{"role": "user", "content": "hi"}]).status_code == 200
        assert daemon.http.get("/api/tags").status_code == 200
        assert daemon.stop() == 0
        assert all(connection.fileno() >= 0 for connection in hub.connections), "none was ever answered"
