"""A SOCKS 5 proxy on loopback that asks for no name and connects to addresses and host names (RFC 1928)."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        _, n_methods = self.rfile.read(2)
        self.rfile.read(n_methods)
        self.wfile.write(b"\x05\x00")
        *_, kind = self.rfile.read(4)
        host = socket.inet_ntoa(self.rfile.read(4)) if kind == 1 else self.rfile.read(self.rfile.read(1)[0]).decode()
        (port,) = struct.unpack("!H", self.rfile.read(2))
        assert isinstance(self.server, SocksProxy)
        self.server.targets.append((host, port))
        with socket.create_connection(self.server.elsewhere.get(host, (host, port)), 10) as there:
            self.wfile.write(b"\x05\x00\x00\x01" + bytes(6))
            back = threading.Thread(target=_pass_on, args=(there, self.connection), daemon=True)
            back.start()
            _pass_on(self.connection, there)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


class SocksProxy(socketserver.ThreadingTCPServer):
    """`targets` are the hosts and ports that it was asked for; a host in `elsewhere` is played by another."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.targets: list[tuple[str, int]] = []
        self.elsewhere: dict[str, tuple[str, int]] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def socks_proxy() -> Iterator[SocksProxy]:
    with SocksProxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
