"""A TCP proxy before the daemon, for clients on bad lines: it cuts, delays and dribbles.

    with proxy(daemon, Line(cut_after=100)) as port: ...

Runs in threads of the test. Each direction of a connection is one thread, and what it does to the bytes is one `Line`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.daemon import Daemon


class Line(NamedTuple):
    """What happens to the bytes of one direction. `piece` is how many travel at once, `pause_s` the time between two
    pieces; after `cut_after` bytes the connection is closed on both sides."""

    piece: int = 65536
    pause_s: float = 0.0
    cut_after: int | None = None


@contextmanager
def proxy(daemon: Daemon, up: Line = Line(), down: Line = Line()) -> Iterator[int]:  # noqa: B008 - immutable
    """The port of a proxy; `up` is what the client sends. At the end every connection is closed."""
    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", daemon.port))
                connections.extend((client, server))
                for source, target, line in ((client, server, up), (server, client, down)):
                    threads.append(threading.Thread(target=_carry, args=(source, target, line), daemon=True))
                    threads[-1].start()

    accepting = threading.Thread(target=serve, daemon=True)
    accepting.start()
    try:
        yield int(listening.getsockname()[1])
    finally:
        # On Linux, closing alone does not wake a thread that waits in accept().
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        accepting.join()
        for connection in connections:
            _end(connection)
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()


def _carry(source: socket.socket, target: socket.socket, line: Line) -> None:
    left = line.cut_after
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            for start in range(0, len(data), line.piece):
                piece = data[start : start + line.piece]
                target.sendall(piece if left is None else piece[:left])
                if left is not None:
                    left -= len(piece)
                    if left <= 0:
                        _end(source)
                        _end(target)
                        return
                if line.pause_s:
                    time.sleep(line.pause_s)
        target.shutdown(socket.SHUT_WR)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
