"""The daemon's listening sockets, the names that other machines may call them by, and each connection: uvicorn's
httptools protocol with the bounds that it lacks.

Runs in the daemon's event loop. A request, headers and body, must have arrived within `deadline_s` of its first byte
(of the connection's opening, for the first request), an uploaded file within `deadline_s` of its last piece; its head
is bounded in bytes and in fields before the parser sees it; and a client that accepts no output for `deadline_s` is cut
off, so that it cannot hold a model for ever. Clients keep a connection for their next request, so one without a request
stays open for `IDLE_S`, and clients that ask for that are told of it. Of more than `MAX_CONNECTIONS` at once, from this
machine or from others, the one that has been without a request for the longest is closed, and where all have one, the
last one is answered 503. None of this costs anything per token: the timers move only when a request begins or ends,
when a piece of a file arrives, or when the socket's buffer fills or empties.

What comes along in a body and is none of it (sizes of chunks, their extensions, trailers) is bounded as a head is, and
trailers are dropped.

Does not: look at what the headers say (`limits.py` does), or bound the body's size.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import re
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from localrun.access.certificate import own_names
from localrun.config import ConfigError, Settings
from localrun.errors import PortBusy
from localrun.server.http.operation import Find

_Port = TypeVar("_Port", int, int | None)


class Listening(NamedTuple):
    """The daemon's sockets: for this machine, without encryption, and for others, with TLS; None if it has no other
    address than a loopback one. `local_v6` is where `localhost` leads first if all addresses are listened on."""

    local: socket.socket
    outside: socket.socket | None = None
    local_v6: socket.socket | None = None

    def close(self) -> None:
        for one in filter(None, self):
            one.close()


def listen(host: str, port: int) -> Listening:
    """Sockets at one port; port 0 takes a free one. Besides another address than a loopback one there is always
    127.0.0.1, so that programs of this machine find the daemon where they expect it.

    Raises ConfigError for an address that this machine does not have, and PortBusy.
    """
    address = address_of(host)
    if address.is_loopback:
        return Listening(bind(host, port))
    outside = bind(str(address), port)
    port = outside.getsockname()[1]
    try:
        if not address.is_unspecified:
            return Listening(bind("127.0.0.1", port), outside)
        # All addresses, one of them with a socket of its own, which the system prefers. Only the two of us may: that
        # nobody else was there is what the first socket, without the option, found out.
        outside.close()
        outside = bind(str(address), port, shares=True)
        local, local_v6 = bind("127.0.0.1", port, shares=True), None
        if address.version == 6:
            with contextlib.suppress(ConfigError):  # loopback may lack it
                local_v6 = bind("::1", port, shares=True)
        return Listening(local, outside, local_v6)
    except BaseException:
        outside.close()
        raise


# For a while Windows keeps the port of a daemon that has just ended, with its connections.
_RETRIES, _RETRY_AFTER_S = 12, 0.25


def bind(host: str, port: int, *, shares: bool = False, n_retries: int = _RETRIES) -> socket.socket:
    """A bound socket; port 0 takes a free one. With `shares` another socket of this process may have the port, too.

    Raises ConfigError for an address that this machine does not have, and PortBusy.
    """
    address = address_of(host)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Elsewhere the option lets a restarted daemon take its port back at once; on Windows it would let two programs
        # share one port.
        if sys.platform != "win32":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        elif not shares:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        if address.version == 6 and address.is_unspecified:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((str(address), port))
        # Only listening finds out about another socket that was bound with the same option.
        listening.listen()
    except OSError as error:
        listening.close()
        if str(sys.platform) != "win32" or error.errno != errno.EADDRINUSE or not n_retries:
            raise _cannot_listen(error, host, port) from None
        time.sleep(_RETRY_AFTER_S)
        return bind(host, port, shares=shares, n_retries=n_retries - 1)
    listening.setblocking(False)
    return listening


# What Windows says of a client that was gone before it was accepted.
_GONE = (64, 1236, 10054)


def keep_accepting(loop: asyncio.AbstractEventLoop) -> None:
    """Pass over such clients: Windows' loop would close the listening socket for good."""
    proactor: Any = getattr(loop, "_proactor", None)
    accept: Any = getattr(proactor, "accept", None)

    async def accept_one_that_stays(listening: socket.socket) -> Any:
        while True:
            try:
                return await accept(listening)
            except OSError as error:
                if getattr(error, "winerror", None) not in _GONE:
                    raise

    if proactor is not None:
        proactor.accept = lambda listening: loop.create_task(accept_one_that_stays(listening))


def url_of(listening: socket.socket) -> str:
    """The base URL that reaches a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{bracketed(host)}:{port}"


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that a host name or an address stands for. Raises ConfigError."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host is {host!r}, which no address is known for ({error}); use an address of this machine, 0.0.0.0 for "
            f"all of them, or 127.0.0.1"
        ) from None
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


_WILDCARDS = frozenset({"0.0.0.0", "::"})


def is_wildcard(host: str) -> bool:
    """Whether the address stands for all of this machine's."""
    return host in _WILDCARDS


def is_loopback_address(host: str) -> bool:
    """Whether it is an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """As a URL and a Host header have it."""
    return f"[{host}]" if ":" in host else host


def _as_called(end: tuple[str, _Port] | None) -> tuple[str, _Port] | None:
    """Address and port; a socket for both versions has those of version 4 in the form of the other."""
    return None if end is None else (end[0].removeprefix("::ffff:"), end[1])


def served_names(settings: Settings) -> frozenset[str]:
    """Lower-case host names: the machine's own, alone and with `.local`, the address listened on if it is a name, and
    those of `settings.host_names`."""
    found = {*own_names(), *listed_names(settings), settings.host.lower()}
    return frozenset(name for name in found if name and ":" not in name and not is_wildcard(name))


def listed_names(settings: Settings) -> frozenset[str]:
    """Those of `settings.host_names`, in lower case."""
    return frozenset(name.strip().lower().rstrip(".") for name in settings.host_names.split(","))


def _cannot_listen(error: OSError, host: str, port: int) -> PortBusy | ConfigError:
    if sys.platform == "win32" and error.errno == errno.EACCES:
        return PortBusy(
            f"port {port} of {host} is another program's, or Windows keeps it for virtual machines (look at `netsh "
            f"interface ipv4 show excludedportrange tcp`); choose another port with --port or LOCALRUN_PORT"
        )
    if error.errno == errno.EADDRINUSE:
        return PortBusy(
            f"port {port} of {host} is in use by another program (another localrun, or Ollama?); stop it, or choose "
            f"another port with --port or LOCALRUN_PORT"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} may not be used without special rights; choose one above 1023 with --port")
    return ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}")


MAX_HEAD_BYTES = 64 * 1024
MAX_HEADER_FIELDS = 128
# From this machine, and as many from others, of which one gets half: nobody needs a key to open them.
MAX_CONNECTIONS = 512
# Clients keep unused connections for 15 seconds (aiohttp) to 90 (Go), and agents wait for their tools in between. Who
# sends into a connection that was just closed does not know whether the request was read, and must not repeat it.
IDLE_S = 300
# How long a connection over that may take for the request that is refused.
_REFUSAL_S = 1.0

# What a client that wants TLS sends first; no method begins with it.
_TLS_HANDSHAKE = b"\x16\x03"
_END_OF_HEAD = b"\r\n\r\n"
# Java's HTTP client (editors use it) offers an upgrade to h2c with every request. httptools then ends the request
# after its head and drops the body. We never upgrade, so the parser is not told; the name keeps its length.
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_UPGRADE_OR_PART = re.compile(
    rb"\r\nupgrade:|(?<!\r\n)\r(?:\n(?:u(?:p(?:g(?:r(?:a(?:d(?:e)?)?)?)?)?)?)?)?\Z", re.IGNORECASE
)
_TOO_MANY = (
    f'{{"error": "localrun has too many connections: {MAX_CONNECTIONS} of this machine, as many of others and half of '
    f'that of one address are the most; close some, or let requests share them, and try again"}}'
).encode()
UPGRADE_OFFER = "x-upgrd"  # as it is then called
_NOT_UPGRADE = f"\r\n{UPGRADE_OFFER}:".encode()


class _UnchunkedCycle(RequestResponseCycle):
    """The answer to a client of HTTP/1.0, which knows no chunks: a body of unknown length goes out as it is, and ends
    with the connection."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if all(name != b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
                self.is_open_ended = True
                self.keep_alive, self.default_headers = False, []
        elif getattr(self, "is_open_ended", False):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class BoundedConnection(HttpToolsProtocol):
    """As its base, with deadlines and a bounded head. `on_refused` is told the status of what no app hears of."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        deadline_s: float,
        on_refused: Callable[[int], None] = lambda status: None,
        find: Find = lambda method, path: None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline_s = deadline_s
        self._on_refused = on_refused
        self._find = find
        self._receiving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        # True from the end of one request to the end of the next one's head; the head is held back until it is whole.
        self._head_open = True
        self._head = b""
        # The end of what the parser has of a head that is not whole: of a request that came along with the one before.
        self._parsed = b""
        self._is_parsing_head = False
        self._is_upload = False
        self._is_one_too_many = False
        # Bytes since the last ones of the body.
        self._n_beside_body = 0

    # --- arrival -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client, self.server = _as_called(self.client), _as_called(self.server)
        crowd = self._crowd()
        self._is_one_too_many = bool(crowd) and not _close_idlest(crowd)
        if self._is_one_too_many:
            self._receiving = self.loop.call_later(_REFUSAL_S, transport.close)
        else:
            self._start_receiving()

    def data_received(self, data: bytes) -> None:
        if self._receiving is None and self._head_open:
            self._start_receiving()
        if self._head_open:
            self._unset_keepalive_if_required()
            self._head += data
            if self._head.startswith(_TLS_HANDSHAKE):  # has no end of a head, and both sides would wait
                self._answer_and_close(b"400 Bad Request")
                return
            found = (self._parsed + self._head).find(_END_OF_HEAD)
            end = len(self._head) if found < 0 else max(0, found - len(self._parsed))
            if end > MAX_HEAD_BYTES or self._head.count(b"\r\n", 0, end) > MAX_HEADER_FIELDS:
                self._answer_and_close(b"431 Request Header Fields Too Large")
                return
            if found < 0:
                return
            if self._is_one_too_many:
                self._answer_and_close(b"503 Service Unavailable", _TOO_MANY)
                return
            data = _UPGRADE.sub(_NOT_UPGRADE, self._head[:end]) + self._head[end:]
            self._head = self._parsed = b""
        self._n_beside_body += len(data)
        data = self._feed(data)
        if self._n_beside_body > MAX_HEAD_BYTES and not self._head_open:
            self._answer_and_close(b"431 Request Header Fields Too Large")
            return
        if self._is_parsing_head:
            self._parsed = data[1 - len(_END_OF_HEAD) :]

    def _feed(self, data: bytes) -> bytes:
        """Gives data to the parser, without offers of an upgrade in the heads of requests that came along with the one
        before. Only the parser knows what is a head, so it is asked before each. What may be the beginning of one is
        held back. Returns what was parsed."""
        begin = 0
        for found in _UPGRADE_OR_PART.finditer(data):
            super().data_received(data[begin : found.start()])
            begin = found.start()
            if self.transport.is_closing():
                return data
            if self._is_parsing_head and found[0].endswith(b":"):
                super().data_received(_NOT_UPGRADE)
                begin = found.end()
            elif self._is_parsing_head and found.end() == len(data):
                self._head = data[begin:]
                return data[:begin]
        super().data_received(data[begin:])
        return data

    def on_message_begin(self) -> None:
        self._is_parsing_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_parsing_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._n_beside_body = 0
        if self._is_upload:
            self._stop_receiving()
            self._start_receiving()
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._n_beside_body = 0
        self._head_open = self._is_parsing_head = False
        super().on_headers_complete()
        if self.cycle is not None:
            asks = any(name == b"connection" and b"keep-alive" in value.lower() for name, value in self.headers)
            if asks:
                kept = [(b"connection", b"keep-alive"), (b"keep-alive", b"timeout=%d" % self.timeout_keep_alive)]
                self.cycle.default_headers = self.cycle.default_headers + kept
            if self.scope["http_version"] == "1.0":
                self.cycle.keep_alive = asks
                self.cycle.__class__ = _UnchunkedCycle
        operation = self._find(self.scope["method"], self.scope["path"])
        self._is_upload = operation is not None and operation.body is bytes

    def on_message_complete(self) -> None:
        self._head_open = True
        self._is_upload = False
        self._stop_receiving()
        super().on_message_complete()

    # --- departure -----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._deadline_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stalled()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receiving()
        self._stop_stalled()
        super().connection_lost(exc)

    # --- private -------------------------------------------------------------------------------------------------

    def _crowd(self) -> list[BoundedConnection]:
        """Those that are too many with this one: of its address, of this machine's, or of others'. Else none."""
        if len(self.connections) <= MAX_CONNECTIONS // 2:
            return []
        connections = cast("set[BoundedConnection]", self.connections)
        alike = [one for one in connections if one.scheme == self.scheme and not one.transport.is_closing()]
        if self.scheme != "http" and self.client is not None:
            address = self.client[0]
            of_address = [one for one in alike if one.client is not None and one.client[0] == address]
            if len(of_address) > MAX_CONNECTIONS // 2:
                return of_address
        return alike if len(alike) > MAX_CONNECTIONS else []

    def _start_receiving(self) -> None:
        self._receiving = self.loop.call_later(self._deadline_s, self._on_deadline)

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _on_deadline(self) -> None:
        self._receiving = None
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (self._head_open and is_answering):
            # The late request is a pipelined one: reading is paused on our side while an earlier answer is on its way.
            self._start_receiving()
        elif self._head:
            self._answer_and_close(b"408 Request Timeout")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._on_refused(400)
        super().send_400_response(msg)

    def _answer_and_close(self, status: bytes, body: bytes = b"") -> None:
        self._on_refused(int(status[:3]))
        headers = b"content-type: application/json\r\nretry-after: 1\r\n" if body else b""
        headers += b"content-length: %d\r\nconnection: close\r\n" % len(body)
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + headers + b"\r\n" + body)
        self.transport.close()


def _close_idlest(crowd: list[BoundedConnection]) -> bool:
    """Closes the one that has been without a request for the longest. False where all have one."""
    ends = [(one.timeout_keep_alive_task.when(), at) for at, one in enumerate(crowd) if one.timeout_keep_alive_task]
    if not ends:
        return False
    crowd[min(ends)[1]].transport.close()
    return True
