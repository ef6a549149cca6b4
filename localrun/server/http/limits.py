"""What every request must satisfy before a handler sees it: raw ASGI middleware around the whole app.

A daemon on loopback is reachable by every web page that the user opens, through DNS rebinding (the page's own name
resolves to 127.0.0.1: the Host header gives it away) and through cross-site requests (the Origin header does). So, on
every route, also unknown ones, and before anything runs:

- Host is `localhost`, `127.0.0.1`, `[::1]` or the address listened on, with any port, or, where only loopback is
  listened on, in `settings.host_names`; of a request from another machine, the address that it came to or a name of
  this machine (`connection.py`); else 403.
- Origin is absent, loopback, the scheme of a local application, or in `settings.origins`; of a request from another
  machine, and where Host is a listed one, listed or this server's own; else 403, and a preflight gets no CORS grant.
- It has an API key, where one is needed (`access.py`); else 401.
- Sec-Fetch-Site is not `cross-site`, unless an Origin that passes says which site it is; else 403. It is what a browser
  says about requests that carry no Origin, such as those of images, frames and links.
- A body is JSON by its Content-Type (415), in a known encoding (415), and at most `settings.max_body_bytes`, or
  `MAX_TEXT_BYTES` where no pictures or sound can be in it (413, before it is buffered, also when chunked), both as it
  comes and unpacked; an uploaded file may also be an octet stream, of any size. From clients that are no browser JSON
  may come under any Content-Type: several send another one or none, and a browser that sends a body names its Origin.
- The bodies of all requests under way, files aside, have at most `MAX_BODIES` times that size together; else 429.
- At most `MAX_UPLOADS` files are uploaded at once; else 429.

Runs in the daemon's event loop, once per request; `send` is wrapped only where an answer needs CORS headers or there is
a body. All requests pass here, so here they are counted: a daemon may end when there was none for long (`idle_s`), and
whoever keeps accounts is told of each one's end.

Does not: enforce time or header size (`connection.py` does), or know keys (`access.py` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
import zlib
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localrun.config import Settings, origins_of
from localrun.errors import BadRequest, Forbidden, LocalrunError, QueueFull, TooLarge, UnsupportedMediaType
from localrun.server.http.access import LIMIT_HEADERS, Access, Caller, is_loopback
from localrun.server.http.connection import bracketed, is_loopback_address, listed_names, served_names
from localrun.server.http.exchange import ACCOUNT, Account, Ended, LoopWatch, header_values, refusal
from localrun.server.http.operation import Find

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Schemes that a page from the network cannot have: desktop applications and editor panels.
_LOCAL_APP_ORIGIN = re.compile(r"(?:app|file|tauri|vscode-webview|vscode-file)://[^\s,]*", re.ASCII)
_LOOPBACK_ORIGIN = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d{0,5})?", re.ASCII | re.IGNORECASE)
# OpenAI's routes for those whose base URL ends before /v1, as llama-server serves them.
ALIASES = {
    path: f"/v1{path}"
    for path in (
        *("/chat/completions", "/responses", "/embeddings"),
        *("/chat/completions/input_tokens", "/responses/input_tokens"),
    )
}
# Two million tokens.
MAX_TEXT_BYTES = 8 * 1024 * 1024
_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})

# So many of the largest bodies may be there at once, from their first byte to the end of their answers.
MAX_BODIES = 8

# So many files may be uploaded at once. Each has one or two pieces of a megabyte in memory.
MAX_UPLOADS = 64

# How long a refused body is read and thrown away, in all and while none of it comes. A socket closed with unread input
# resets the connection, and the client would lose the answer that says what was wrong.
_LINGER_S = 30.0
_LINGER_QUIET_S = 1.0


# What programs of this machine call it: by loopback, by the address of a listener for all, and from its containers. No
# page of somebody else's can have these names, and its Origin is looked at all the same.
_OWN_HOSTS = frozenset(
    {
        *("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]"),
        *("host.docker.internal", "gateway.docker.internal", "host.containers.internal"),
    }
)


# With slashes too many. Those further on may be a model's name.
_PREFIX = re.compile(r"/+(?:(v1|api)/+)?")


def _meant(path: str) -> str:
    """The route's own path, for a base URL that ends in a slash, in `/v1` where the client adds that itself or speaks
    Ollama's API, or without it where the client does not."""
    path = _PREFIX.sub(lambda found: f"/{found[1]}/" if found[1] else "/", path, count=1)
    if path.startswith(("/v1/v1/", "/v1/api/")):
        path = path[len("/v1") :]
    if path.endswith("/"):
        path = path.rstrip("/") or "/"
    return ALIASES.get(path, path)


class Limits:
    """The middleware. Raises ConfigError when `settings.origins` holds something that is not an origin."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        access: Access | None = None,
        loop_watch: LoopWatch | None = None,
        on_ended: Ended = lambda scope, account, seconds: None,
        find: Find = lambda method, path: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._on_ended = on_ended
        self._is_stopping = is_stopping
        self._find = find
        self._access = access
        self._loop_watch = loop_watch or LoopWatch()
        self._room = _BodyRoom(settings.max_body_bytes)
        self._hosts = set(_OWN_HOSTS)
        self._hosts_of_proxies: frozenset[str] = frozenset()
        if is_loopback_address(settings.host):
            self._hosts.add(bracketed(settings.host.lower()))
            # Nobody else can reach it, so these are for a proxy of this machine that passes on how it was called.
            self._hosts_of_proxies = listed_names(settings)
        self._served_names = set(served_names(settings))
        self._origins = origins_of(settings.origins)
        self._n_open = 0
        self._n_uploads = 0
        self._last_end_s = time.monotonic()

    def serve_name(self, name: str) -> None:
        """Accepts `name` in the Host header of other machines."""
        self._served_names.add(name.lower())

    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is open. An open event stream is one: a daemon that
        somebody watches is not idle."""
        return 0.0 if self._n_open else time.monotonic() - self._last_end_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Only the lifespan is left: the server is started without WebSockets.
            await self._app(scope, receive, send)
            return
        scope["path"] = _meant(scope["path"])
        account = scope[ACCOUNT] = Account()
        began_s = time.monotonic()
        self._n_open += 1
        try:
            await self._loop_watch.watched(scope, self._check_and_serve(scope, receive, send))
        finally:
            self._n_open -= 1
            self._last_end_s = time.monotonic()
            self._on_ended(scope, account, self._last_end_s - began_s)

    async def _check_and_serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_local = is_loopback(scope)
        origin: str | None = None
        caller: Caller | None = None
        operation = self._find(scope["method"], scope["path"])
        right = None if operation is None else operation.right
        is_text = operation is not None and operation.is_text
        most_bytes = min(self._room.each_bytes, MAX_TEXT_BYTES) if is_text else self._room.each_bytes
        try:
            host = self._check_host(scope, is_local=is_local)
            origin = self._check_origin(scope, host, is_local=is_local)
            if origin is not None and scope["method"] == "OPTIONS" and _first(scope, b"access-control-request-method"):
                asked = _first(scope, b"access-control-request-headers") or ""
                scope[ACCOUNT].status = 200
                await grant_preflight(send, origin, asked)
                return
            if self._access is not None:
                caller = await self._access.admit(scope, right)
            file_type = operation.body_content_type if operation is not None and operation.body is bytes else ""
            is_file = bool(file_type)
            has_body = self._check_body(scope, origin, most_bytes, file_type=file_type)
            if is_file:
                self._check_uploads()
        except LocalrunError as error:
            if caller is not None:
                caller.leave()
            if origin is not None:
                send = granting(send, origin)
            await self._refuse(error, scope, receive, send)
            return
        if origin is not None:
            send = granting(send, origin)
        if self._access is None or caller is None:
            await self._serve(scope, receive, send, most_bytes, is_file=is_file, has_body=has_body)
            return
        scope["localrun.caller"] = caller
        send = self._access.auditing(caller, right, scope, send)
        try:
            await self._serve(scope, receive, send, most_bytes, is_file=is_file, has_body=has_body)
        finally:
            caller.leave()
            caller.commit()

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, most_bytes: int, *, is_file: bool, has_body: bool
    ) -> None:
        if is_file:
            self._n_uploads += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._n_uploads -= 1
            return
        if not has_body:
            await self._app(scope, receive, send)
            return
        encoding = _encoding(scope)
        guard = _BodyGuard(receive, send, self._room, most_bytes, encoding)
        try:
            await self._app(scope, guard.receive, guard.send)
        finally:
            guard.release()
        if guard.is_open:  # neither the handler nor the room has any of the body now
            await self._discard(receive, send)

    def _check_host(self, scope: Scope, *, is_local: bool) -> str:
        hosts = header_values(scope, b"host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        name = match["name"].lower() if match is not None else ""
        shown = hosts[0][:100] if hosts else ""
        if not is_local:
            if name and (name in self._served_names or name == bracketed((scope.get("server") or ("",))[0])):
                return hosts[0].lower()
            raise Forbidden(
                f"the Host header {shown!r} is no name of this machine; use {', '.join(sorted(self._served_names))} or "
                f"its address, or list the name in LOCALRUN_HOST_NAMES"
            )
        if not name or (name not in self._hosts and name not in self._hosts_of_proxies):
            raise Forbidden(
                f"the Host header {shown!r} is not this machine's loopback name; use localhost, 127.0.0.1 or [::1], or "
                f"list the name in LOCALRUN_HOST_NAMES"
            )
        return hosts[0].lower()

    def _check_origin(self, scope: Scope, host: str, *, is_local: bool) -> str | None:
        """The origin, if there is one. `host` is how the server was called, which must be its page's origin, too, for a
        request from another machine or through a proxy."""
        origins = header_values(scope, b"origin")
        if not origins:
            if "cross-site" in header_values(scope, b"sec-fetch-site"):
                raise Forbidden(
                    "another site may not lead a browser here; open this address by typing it, or let the page name "
                    "itself (a CORS request) and list it in LOCALRUN_ORIGINS"
                )
            return None
        origin = origins[0]
        has_page = not is_local or host.partition(":")[0] in self._hosts_of_proxies
        allowed = len(origins) == 1 and (
            (is_local and _LOOPBACK_ORIGIN.fullmatch(origin) is not None)
            or (is_local and _LOCAL_APP_ORIGIN.fullmatch(origin) is not None)
            or (has_page and origin.lower() == f"https://{host}")
            or origin.lower() in self._origins
            or origin.lower().partition("://")[0] + "://*" in self._origins
        )
        if not allowed:
            raise Forbidden(
                f"the origin {origin[:100]!r} may not use this server; LOCALRUN_ORIGINS lists the web pages that may"
            )
        return origin

    def _check_body(self, scope: Scope, origin: str | None, most_bytes: int, *, file_type: str) -> bool:
        """Whether there is one. An uploaded file is not buffered, and is as large as it is: the disk is its limit."""
        chunked = _first(scope, b"transfer-encoding") is not None
        announced = _first(scope, b"content-length") or "0"
        if not (announced.isascii() and announced.isdigit()):
            raise BadRequest(f"Content-Length {announced[:40]!r} is not a number of bytes")
        length = int(announced[:20])
        if not chunked and length == 0:
            return False
        if length > most_bytes and not file_type:
            raise _too_large(most_bytes)
        encoding = _encoding(scope)
        if encoding and (file_type or encoding not in ENCODINGS):
            known = "" if file_type else f", or as {', '.join(ENCODINGS[:-1])} or {ENCODINGS[-1]}"
            raise UnsupportedMediaType(
                f"Content-Encoding {encoding[:40]!r} is not accepted; send the body as it is{known}"
            )
        if scope["method"] in _METHODS_WITH_BODY:
            is_page = origin is not None or bool(header_values(scope, b"sec-fetch-site"))
            _check_content_type(_first(scope, b"content-type"), is_page=is_page, file_type=file_type)
        return True

    def _check_uploads(self) -> None:
        """Raises QueueFull when no more files may be uploaded at once."""
        if self._n_uploads >= MAX_UPLOADS:
            raise QueueFull(
                f"{MAX_UPLOADS} files are being uploaded, and no more may be at once; try again when one of them has "
                f"ended",
                retry_after_s=1.0,
            )

    async def _refuse(self, error: LocalrunError, scope: Scope, receive: Receive, send: Send) -> None:
        named, body = refusal(scope, error)
        answer_headers = [*named, (b"content-length", str(len(body)).encode("ascii"))]
        length = _first(scope, b"content-length")
        has_body = _first(scope, b"transfer-encoding") is not None or length not in (None, "0")
        if has_body:
            answer_headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": error.status, "headers": answer_headers})
        await send({"type": "http.response.body", "body": body, "more_body": has_body})
        if has_body:
            await self._discard(receive, send)

    async def _discard(self, receive: Receive, send: Send) -> None:
        """Reads the rest of a refused body, and ends the answer. A daemon that ends waits for nobody's body."""
        with contextlib.suppress(TimeoutError):
            clock = asyncio.get_running_loop().time
            end_s = clock() + _LINGER_S
            async with asyncio.timeout_at(end_s) as waiting:
                while not self._is_stopping():
                    waiting.reschedule(min(end_s, clock() + _LINGER_QUIET_S))
                    message = await receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _BodyRoom:
    """What each body may take, and what all of those under way take together."""

    def __init__(self, each_bytes: int) -> None:
        self.each_bytes = each_bytes
        self.taken_bytes = 0

    def check(self) -> None:
        """Raises QueueFull when all bodies together are too large."""
        if self.taken_bytes > MAX_BODIES * self.each_bytes:
            raise QueueFull(
                f"the bodies of the requests under way have more than {MAX_BODIES * self.each_bytes} bytes together "
                f"({MAX_BODIES} times LOCALRUN_MAX_BODY_BYTES); try again when some of them have ended",
                retry_after_s=1.0,
            )


def _first(scope: Scope, name: bytes) -> str | None:
    return next(iter(header_values(scope, name)), None)


def _encoding(scope: Scope) -> str:
    """What the body is packed as; empty for one that is sent as it is."""
    encoding = ",".join(header_values(scope, b"content-encoding")).strip().lower()
    return "" if encoding == "identity" else encoding


# A stream is given no more at once: what lies behind its end is copied, and a body may be millions of tiny streams.
_PIECE_BYTES = 4096
# Beyond 8 MiB decoders need not go (RFC 8878, 3.1.1.1.2), and each keeps that much.
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}


class _Unpacker(Protocol):
    """As of zlib and zstd: of one stream; what comes behind it is left in `unused_data`."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


_UNPACKERS: dict[str, Callable[[bytes], _Unpacker]] = {
    "gzip": lambda _: zlib.decompressobj(zlib.MAX_WBITS | 16),
    # Some send it without the header that belongs to it.
    "deflate": lambda body: zlib.decompressobj(zlib.MAX_WBITS if body[0] & 15 == zlib.DEFLATED else -zlib.MAX_WBITS),
    "zstd": lambda _: zstd.ZstdDecompressor(options=_ZSTD_OPTIONS),
}
ENCODINGS = tuple(_UNPACKERS)


def unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """A compressed body; at most `max_bytes` and one more, which tells that there is more. It is unpacked whole, once
    all of it has arrived, so that a client that sends slowly holds no more than what it has sent. Raises BadRequest for
    what is not whole, or is not in that encoding."""
    found, at = bytearray(), 0
    while at < len(body) and len(found) <= max_bytes:
        unpacker = _UNPACKERS[encoding](body[at : at + 1])
        try:
            while at < len(body) and not unpacker.eof and len(found) <= max_bytes:
                piece = body[at : at + _PIECE_BYTES]
                found += unpacker.decompress(piece, max_bytes + 1 - len(found))
                at += len(piece) - len(unpacker.unused_data)
        except (zlib.error, zstd.ZstdError) as error:
            raise BadRequest(f"the body is not {encoding}, as its Content-Encoding says: {error}") from None
        if not unpacker.eof and len(found) <= max_bytes:
            raise BadRequest(f"the body breaks off: it is not whole {encoding}")
    return bytes(found)


class _BodyGuard:
    """Counts a body as it comes, and unpacks it in a thread. The read that goes over a limit raises TooLarge or
    QueueFull in the handler, and the answer to it then closes the connection if the rest of the body is still on its
    way."""

    def __init__(self, receive: Receive, send: Send, room: _BodyRoom, max_bytes: int, encoding: str) -> None:
        self._receive = receive
        self._encoding = encoding
        self._send = send
        self._room = room
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._is_over = False
        # The answer to a body that is over a limit has no end yet.
        self.is_open = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        self._count(message)
        if not self._encoding:
            return message
        pieces = [message.get("body", b"")]
        while message.get("more_body", False):
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._count(message)
            pieces.append(message.get("body", b""))
        encoding, self._encoding = self._encoding, ""
        body = await asyncio.to_thread(unpacked, b"".join(pieces), encoding, self._max_bytes)
        self.release()
        whole = {"type": "http.request", "body": body, "more_body": False}
        self._count(whole)
        return whole

    def _count(self, message: Message) -> None:
        n_bytes = len(message.get("body", b""))
        self._n_bytes += n_bytes
        self._room.taken_bytes += n_bytes
        try:
            if self._n_bytes > self._max_bytes:
                raise _too_large(self._max_bytes)
            self._room.check()
        except LocalrunError:
            self._is_over = message.get("more_body", False)
            raise

    def release(self) -> None:
        """The request has ended, and its body with it."""
        self._room.taken_bytes -= self._n_bytes
        self._n_bytes = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if not self._is_over:
            await self._send(message)
        elif message["type"] == "http.response.start":
            await self._send({**message, "headers": [*message.get("headers", []), (b"connection", b"close")]})
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            self.is_open = True


def _check_content_type(content_type: str | None, *, is_page: bool, file_type: str) -> None:
    # A browser sends a form or a text to any server without asking it; programs that leave the type out, or call JSON
    # something else as curl's -d does, are not a page's doing.
    if not is_page and (content_type is None or not file_type):
        return
    media_type = (content_type or "").partition(";")[0].strip().lower()
    # Ollama's clients send files as JSON by their type.
    wanted = file_type or "application/json"
    if media_type != wanted and not (media_type == "application/json" and wanted != "multipart/form-data"):
        shown = media_type[:80] or "nothing"
        if file_type:
            raise UnsupportedMediaType(f"the Content-Type is {shown!r}; send the file as '{file_type}'")
        raise UnsupportedMediaType(f"the Content-Type is {shown!r}; send the body as 'application/json'")


def _too_large(max_bytes: int) -> TooLarge:
    why = "LOCALRUN_MAX_BODY_BYTES sets the limit"
    if max_bytes == MAX_TEXT_BYTES:
        why = "that much text is more than any context holds, so send less of it"
    return TooLarge(f"the body is larger than {max_bytes} bytes; {why}")


_ALLOWED_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
# The headers that browser clients send beside the simple ones; the x-stainless-* ones come from the OpenAI SDK. The
# names asked for in a preflight are granted too when they are plain tokens: headers grant nothing here by themselves.
_ALLOWED_HEADERS = (
    "authorization, x-api-key, api-key, content-type, accept, user-agent, x-requested-with, openai-beta, "
    "x-localrun-client, x-localrun-lane, x-localrun-latency, x-localrun-deadline, x-localrun-speculation, "
    "x-stainless-arch, x-stainless-async, x-stainless-custom-poll-interval, "
    "x-stainless-helper-method, x-stainless-lang, x-stainless-os, x-stainless-package-version, "
    "x-stainless-poll-helper, x-stainless-retry-count, x-stainless-runtime, x-stainless-runtime-version, "
    "x-stainless-timeout"
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-_, ]{1,2048}", re.ASCII)
# What a page may read of an answer besides its type and length.
_EXPOSED_HEADERS = b", ".join(
    (
        *(b"x-localrun-request", b"x-localrun-error", b"x-localrun-truncated", b"x-localrun-ignored"),
        *(b"x-localrun-tier", b"x-request-id", b"request-id", b"retry-after", *LIMIT_HEADERS),
    )
)
_PREFLIGHT_AGE_S = b"600"


def granting(send: Send, origin: str) -> Send:
    """`send`, with the grant added to the answer's headers."""

    async def send_granting(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_cors_headers(origin)]}
        await send(message)

    return send_granting


def _cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED_HEADERS),
        (b"vary", b"origin"),
    ]


async def grant_preflight(send: Send, origin: str, asked: str) -> None:
    """Answers a preflight. `asked` is its Access-Control-Request-Headers."""
    allowed = f"{_ALLOWED_HEADERS}, {asked}" if _HEADER_NAMES.fullmatch(asked) else _ALLOWED_HEADERS
    answer = [
        *_cors_headers(origin),
        (b"access-control-allow-methods", _ALLOWED_METHODS),
        (b"access-control-allow-headers", allowed.encode("ascii")),
        # Chrome asks for it where a page that is not of this machine or its network reaches into it.
        (b"access-control-allow-private-network", b"true"),
        (b"access-control-max-age", _PREFLIGHT_AGE_S),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": answer})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
