"""A hub that accepts connections and never answers."""

from __future__ import annotations

import contextlib
import socket
import threading


class HangingHub:
    """A context manager; `endpoint` is its address, `connections` are all that it ever accepted."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> HangingHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        for open_socket in (self._listener, *self.connections):
            open_socket.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.connections.append(self._listener.accept()[0])
