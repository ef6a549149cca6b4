"""One HTTP request and its answer, as raw ASGI; a route's handler as an app that serves one; and how long each holds
the event loop.

A request's body is strict JSON for one struct per route, and JSON here is what the standard says and no more: no NaN or
Infinity, no number that a double cannot hold, no nesting beyond what the parser's stack holds. Nothing else parses a
body, so of two equal keys the last one counts for every check. Half a surrogate pair, which is what JavaScript writes
of a text that was cut inside an emoji, is read as U+FFFD. Unknown fields are ignored, since clients send fields of
every server they know; known fields of the wrong type or out of range are refused with the field's name and its limit.

Owner: the task that serves the request, in the daemon's event loop. A whole answer is two messages; a stream is one
message per batch of tokens, without any layer in between.

Invariants: every way a request can end becomes at most one well-formed answer; after the client has gone nothing is
sent and the handler is cancelled within one turn of the event loop, whatever it was waiting for (a load, a template, a
slot, a token); a stream is never silent for much longer than `PING_AFTER_S`.

Does not: know what an answer's bytes mean, know any API's fields, or bound a body's size (`limits.py` does).
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar
from urllib.parse import parse_qs

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Message, Receive, Scope, Send

from localrun.errors import BadRequest, LocalrunError, ModelNotFound, TooLarge, Unavailable
from localrun.server import notices
from localrun.server.http import failures
from localrun.server.http.access import OWNER, Caller
from localrun.server.http.failures import Headers, Shape
from localrun.server.http.path_redaction import redact_paths, redact_paths_in
from localrun.server.jobs.generation import Generation, new_id

_JSON: Headers = [(b"content-type", b"application/json")]
# What a stream that has no news sends, so that no client or proxy takes it for dead. Parsers of JSON skip the space
# before Ollama's next line, and those of SSE the comment.
_PINGS = {Shape.OLLAMA: b" ", Shape.ANTHROPIC: b'event: ping\ndata: {"type":"ping"}\n\n'}
_PING = b": ping\n\n"
PING_AFTER_S = 10.0

# Of one body: lists, objects, numbers and texts. As many are made within a tenth of a second, while nothing else runs.
MAX_VALUES = 200_000
_MORE_TEXT = re.compile(rb'(?:[^"\\]{1,1024}+|\\.){0,64}+')
# An escape of half a surrogate pair, behind backslashes that stand for themselves.
_HIGH, _LOW = (rb"\\u[dD][%b][0-9a-fA-F]{2}" % digits for digits in (b"89abAB", b"c-fC-F"))
_HALF_PAIR = re.compile(
    rb"(?<!\\)((?:\\\\)*+)(?:%(high)b(?!%(low)b)|(?<!%(high)b)%(low)b)" % {b"high": _HIGH, b"low": _LOW}
)

# Of a body that is too large to keep.
PIECE_BYTES = 1024 * 1024
_MAX_SAID = 200  # msgspec quotes a wrong value of an enumeration, however long it is
_AT = re.compile(r" - at `(?P<kind>key in )?\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")

Body = TypeVar("Body")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


def header_values(scope: Scope, name: bytes) -> list[str]:
    """All values of a header, by lower-case name. Latin-1, as HTTP has it: decoding never fails."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def id_header(shape: Shape, request_id: str) -> Headers:
    """What names the request in the family's answers."""
    name = b"request-id" if shape is Shape.ANTHROPIC else b"x-request-id"
    return [(name, request_id.encode("ascii"))]


def refusal(scope: Scope, error: LocalrunError) -> tuple[Headers, bytes]:
    """The headers and the body of an error before there is an exchange; the request's account has it, too."""
    shape, request_id = failures.shape_of(scope["path"]), new_id()
    account: Account = scope[ACCOUNT]
    account.status, account.error, account.request_id = error.status, type(error), request_id
    return [*failures.headers(error), *id_header(shape, request_id)], failures.body(error, shape, request_id)


# Where it is found in a request's scope.
ACCOUNT = "localrun.account"
# Nobody was there any more to be answered; as nginx has it.
CLIENT_GONE = 499


class Account(msgspec.Struct, kw_only=True):
    """What is known of an HTTP request when it ends, for `/metrics` and the log of requests, with nothing of what was
    asked or answered. `Limits` makes one for every request and says at the end how long it took; whoever answers fills
    it in.

    `status` is the status line's, 0 before there is one; `error` the kind of what the client was told, also as the
    last event of a stream (the error itself would keep the body, by its traceback); `request_id` the one in the
    answer's header. `records` are of its answers.
    """

    status: int = 0
    error: type[LocalrunError] | None = None
    request_id: str = ""
    records: list[Generation] = []


# Told of a request that has ended: its scope, how it ended, and the seconds that it took.
Ended = Callable[[Scope, Account, float], None]


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


class Exchange:
    """See the module. `shape` is the family's; `caller` asks; `started` is true once the status line is sent.
    `more_headers` are for whatever answer there will be. `tier` is which model of a tier answers, and why (routing.py);
    empty without one."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, shape: Shape) -> None:
        self.scope = scope
        self.path: str = scope["path"]
        self.shape = shape
        self.caller: Caller = scope.get("localrun.caller", OWNER)
        self.account: Account = scope.setdefault(ACCOUNT, Account())
        self.started = False
        self.more_headers: Headers = []
        self._notices: list[str] = []
        notices.NOTED.set(self._notices)
        self.tier = ""
        self._receive = receive
        self._send = send
        self._is_over = False
        # What a stream says that has no news; asked for each time.
        self.ping: Callable[[], bytes] = lambda: _PINGS.get(shape, _PING)
        self._pinger: asyncio.Task[None] | None = None
        self._written_at_s = 0.0
        self._request_id = new_id()

    def header(self, name: bytes) -> str:
        """The first value of a header, by lower-case name; empty if there is none."""
        return next(iter(header_values(self.scope, name)), "")

    @property
    def path_id(self) -> str:
        """What the path says in the place of its `{id}`."""
        return str(self.scope["path_params"]["id"])

    async def read_json(self, type_: type[Body]) -> Body:
        """The body as `type_`. Raises as `read_body` and `decode_body` do."""
        body = await self.read_body()
        is_large = len(body) >= THREAD_BYTES
        IS_LARGE.set(is_large)
        return await apart(decode_body, body, type_, self.scope if is_large else None)

    async def read_body(self) -> bytes:
        """The whole body. Raises TooLarge beyond the limit (`limits.py`) and ClientGone when the client leaves."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, for one too large to keep. Raises as `read_body` does."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    async def large_pieces(self) -> AsyncIterator[bytes]:
        """The same in fewer pieces, for threads: a hop costs more than copying one."""
        waiting = bytearray()
        async for piece in self.pieces():
            waiting += piece
            if len(waiting) >= PIECE_BYTES:
                yield bytes(waiting)
                waiting.clear()
        if waiting:
            yield bytes(waiting)

    @property
    def announced_bytes(self) -> int:
        """How large the body will be, by its header; 0 where that does not say."""
        said = self.header(b"content-length")
        return int(said[:20]) if said.isascii() and said.isdigit() else 0

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels the body of the `async with` when the client leaves, and raises ClientGone instead.

        To be entered after the body was read: from then on the next message of the client is its going.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if watcher.done() and not watcher.cancelled() and watcher.result() and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()
            self._stop_pings()

    async def answer(self, body: bytes, *, status: int = 200, headers: Headers | None = None) -> None:
        """A whole answer: JSON, unless `headers` name another content type."""
        answer_headers = [*(headers or []), (b"content-length", str(len(body)).encode("ascii"))]
        if not any(name == b"content-type" for name, _ in answer_headers):
            answer_headers += _JSON
        await self._start(status, answer_headers)
        await self.close_stream(body)

    async def answer_json(self, content: object, *, headers: Headers | None = None) -> None:
        """A whole answer, encoded here."""
        await self.answer(msgspec.json.encode(content), headers=headers)

    async def answer_redacted(self, content: object) -> None:
        """The same of what the daemon knows of this machine: only admins are told where files lie."""
        if not self.caller.is_admin:
            content = redact_paths_in(msgspec.to_builtins(content))
        await self.answer_json(content)

    async def answer_in_pieces(self, n_bytes: int, pieces: AsyncIterator[bytes], headers: Headers) -> None:
        """A whole answer of `n_bytes`, for one too large to keep. Raises what the pieces raise: then the answer breaks
        off, and the connection with it."""
        await self._start(200, [*headers, (b"content-length", str(n_bytes).encode("ascii"))])
        async for piece in pieces:
            await self.write(piece)
        await self.close_stream(b"")

    async def open_stream(self, headers: Headers | None = None) -> None:
        """Sends the status line and headers of a stream in the family's format. From then on it says that it is alive
        whenever nothing was written for `PING_AFTER_S`."""
        stream_type = b"application/x-ndjson" if self.shape is Shape.OLLAMA else b"text/event-stream"
        # The last one keeps nginx from collecting pieces until it has some kilobytes.
        unkept = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await self._start(200, [(b"content-type", stream_type), *unkept, *(headers or [])])
        if self.scope.get("method") == "HEAD":
            await self.close_stream(b"")
            raise ClientGone  # nobody reads on
        self._written_at_s = time.monotonic()
        self._pinger = asyncio.create_task(self._ping())

    async def write(self, data: bytes) -> None:
        """One piece of a stream. Waits while the client reads slower than we write."""
        self._written_at_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close_stream(self, data: bytes = b"") -> None:
        """The last piece of a stream, or of a whole answer."""
        # Set first: the server wakes the watcher with a "disconnect" as soon as the answer is complete.
        self._is_over = True
        self._stop_pings()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def redacted(self, error: LocalrunError) -> LocalrunError:
        """The error in the words that who asks may read. The name of a model that is not here is the client's own."""
        self.account.error = type(error)
        if self.caller.is_admin or isinstance(error, ModelNotFound):
            return error
        # Not the same one: perhaps others are told it as well.
        other = error.__class__.__new__(error.__class__)
        other.__dict__.update(error.__dict__)
        other.message = redact_paths(error.message)
        return other

    async def refuse(self, error: LocalrunError) -> None:
        """The error as the answer, or as the last event of a stream that has begun."""
        if self._is_over:
            return
        error = self.redacted(error)
        if self.started:
            await self.close_stream(failures.stream_event(error, self.shape, self._request_id))
        else:
            body = failures.body(error, self.shape, self._request_id)
            await self.answer(body, status=error.status, headers=failures.headers(error))

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        # An answer of one job has the job's own id; of several the first one's.
        named = next((value for name, value in headers if name == b"x-localrun-request"), b"")
        if named:
            self._request_id = named.decode("ascii").partition(",")[0]
        self.account.status, self.account.request_id = status, self._request_id
        if self._notices:
            ignored = notices.shown(self._notices)
            headers = [*headers, (b"x-localrun-ignored", ignored.encode("ascii"))]
            _log.info("request %s: ignored %s", self._request_id, ignored)
        headers = [
            *headers,
            *id_header(self.shape, self._request_id),
            *self.caller.headers(self.shape),
            *self.more_headers,
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _ping(self) -> None:
        while True:
            left_s = self._written_at_s + PING_AFTER_S - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.write(self.ping())

    def _stop_pings(self) -> None:
        if self._pinger is not None:
            self._pinger.cancel()

    async def _watch(self, task: asyncio.Task[object]) -> bool:
        """Waits for the client's going and cancels `task`. False when the answer was over before."""
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        if self._is_over:
            return False
        _log.debug("%s: the client has gone", self.path)
        task.cancel()
        return True


class Endpoint:
    """A route's handler as an ASGI app: every way a request can end becomes one well-formed answer.

    Runs in the daemon's event loop, one task per request. A LocalrunError becomes the family's error JSON, or the last
    event of a stream; a client that left gets nothing; anything unexpected is logged with its traceback, and the client
    gets no details, except what is wrong with the disk.

    Does not: know any API.

    Not a function, so that starlette's routes call it as it is, without a Request and a Response.
    """

    def __init__(
        self, handler: Callable[[Exchange], Awaitable[None]], path: str, *, strict_schemas: bool = False
    ) -> None:
        self._handler = handler
        self._path = path
        self._shape = failures.shape_of(path)
        self._strict_schemas = strict_schemas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[OPERATION] = f"{scope['method']} {self._path}"
        exchange = Exchange(scope, receive, send, self._shape)
        notices.STRICT_SCHEMAS.set(self._strict_schemas)
        try:
            await self._handler(exchange)
        except ClientGone:
            return
        except LocalrunError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:
            # Only the server cancels a request whose client is there: it is stopping, and will not wait any longer.
            await exchange.refuse(Unavailable("the daemon is stopping"))
            raise
        except Exception as error:
            await exchange.refuse(failures.unforeseen(error, f"{scope['method']} {exchange.path}"))


def parameter(exchange: Exchange, name: str) -> str:
    """The last value of a query parameter; empty without one."""
    query: dict[str, list[str]] = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return query.get(name, [""])[-1]


def whole_number(exchange: Exchange, name: str, *, default: int, most: int, least: int = 1) -> int:
    """A query parameter that is a number. Raises BadRequest."""
    text = parameter(exchange, name) or str(default)
    if not (text.isascii() and text.isdigit() and len(text) < 20) or not least <= int(text) <= most:
        raise BadRequest.of(name, f"{text[:40]!r} is not a number from {least} to {most}")
    return int(text)


def decode_body(body: bytes, type_: type[Body], scope: Scope | None = None) -> Body:
    """The body as `type_`. Raises BadRequest, naming the field where there is one, and TooLarge for one of too many
    values, which is decoded in one go. `scope` is that of the request, in another thread than the loop's."""
    if not body.strip():
        raise BadRequest("missing request body; send a JSON object")
    if len(body) > MAX_VALUES and _has_too_many_values(body):
        raise TooLarge(f"the body has more than {MAX_VALUES} values; send fewer parts, numbers or fields at once")
    try:
        with held(scope or {}):
            try:
                value = msgspec.json.decode(body, type=type_)
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                body = _HALF_PAIR.sub(rb"\1\\ufffd", body)
                value = msgspec.json.decode(body, type=type_)
        if not body.isascii():
            body.decode()  # raises for what is no UTF-8, also where nothing looks at it
    except msgspec.ValidationError as error:
        raise _out_of_shape(str(error)) from None
    except ValueError as error:  # msgspec.DecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    return value


def _has_too_many_values(text: bytes) -> bool:
    """By what separates values, outside of texts; looking for that takes less than making them. What is no JSON may be
    counted as it likes."""
    if _n_values(text, 0, len(text)) <= MAX_VALUES:
        return False
    n_values = n_texts = at = 0
    while at >= 0 and n_values <= MAX_VALUES and n_texts <= 4 * MAX_VALUES:
        quote = text.find(b'"', at)
        n_values += _n_values(text, at, quote if quote >= 0 else len(text))
        n_texts += 1
        at = -1 if quote < 0 else _behind_text(text, quote + 1)
    return n_values > MAX_VALUES or n_texts > 4 * MAX_VALUES


def _behind_text(text: bytes, at: int) -> int:
    """Behind the quotation mark that ends a text; -1 where none does. A picture in base64 is one look; others go piece
    by piece."""
    end = text.find(b'"', at)
    if end < 0 or text.find(b"\\", at, end) < 0:
        return end + 1 or -1
    while more := _MORE_TEXT.match(text, at):
        if text[more.end() : more.end() + 1] == b'"':
            return more.end() + 1
        if more.end() == at:
            break  # nothing, or half of an escape
        at = more.end()
    return -1


def _n_values(text: bytes, start: int, end: int) -> int:
    return sum(text.count(each, start, end) for each in (b",", b"[", b"{"))


def _out_of_shape(message: str) -> BadRequest:
    """msgspec says "Expected `int` >= 1 - at `$.options.top_k`"; a person reads the field first."""
    at = _AT.search(message)
    path = at["path"].lstrip(".") if at else ""
    said = message[: at.start()] if at else message
    missing = _MISSING.fullmatch(said)
    if missing:
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return BadRequest(f"{field} is required", field=field)
    said = said[:1].lower() + said[1:_MAX_SAID]
    if not path:
        return BadRequest(f"the body is not as expected: {said}")
    return BadRequest.of(path, said)


STALL_S = 0.1
# The processor's time is asked for no more often than this, for it takes a system call; shorter turns are what the
# clock says.
LONG_S = 0.005
# Where a route keeps its name, which is only known once the request is routed, and where the watch is found.
OPERATION, WATCH = "localrun.operation", "localrun.loop_watch"

# Less takes about a millisecond, and a thread costs a tenth of one.
THREAD_BYTES = 64 * 1024

# Of the request in whose context this is; set when its body is read (exchange.py).
IS_LARGE: ContextVar[bool] = ContextVar("is_large", default=False)


class LoopWatch(Collector):
    """How long the event loop is held, and by which operation.

    What one request computes in the loop, everybody's streams wait for. So each turn of a request's task, from one
    await to the next, is timed, in the processor time of the loop's thread: a machine that is busy with something else
    does not count. Parsing that keeps the interpreter's lock in another thread holds the loop as well, and is added by
    whoever does it (`held`, by any thread). All of it is in `/metrics` by operation; a turn beyond `STALL_S` is counted
    and logged with its name. A turn takes 0.5 us more than without.

    Does not: time what the parser of HTTP does (its bounds are connection.py's), or tasks that requests start.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._longest: defaultdict[str, float] = defaultdict(float)
        self._stalls: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._cpu_s = 0.0
        self.next_look_s = 0.0

    def watched(self, scope: Scope, serving: Coroutine[Any, Any, None]) -> _Watched:
        """The same to await, timed. `scope` is the request's."""
        scope[WATCH] = self
        return _Watched(self, scope, serving)

    def look(self, now_s: float) -> float:
        """The processor time of the loop's thread since the last look."""
        cpu_s = time.thread_time()
        since_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        self.next_look_s = now_s + LONG_S
        return since_s

    def took(self, scope: Scope, seconds: float, longest_s: float) -> None:
        """The request has held the loop for so long in all, and for that long at once."""
        operation = _operation(scope)
        with self._lock:
            self._seconds[operation] += seconds
            self._longest[operation] = max(self._longest[operation], longest_s)

    def stalled(self, scope: Scope, seconds: float) -> None:
        """The request held the loop for so long at once."""
        operation = _operation(scope)
        with self._lock:
            self._stalls[operation] += 1
        _log.warning("%s held the event loop for %.0f ms; all streams waited", operation, seconds * 1000)

    def collect(self) -> Iterable[Metric]:
        """For `/metrics`."""
        longest = GaugeMetricFamily(
            "localrun_loop_longest_seconds", "The longest that a request held the event loop at once.",
            labels=["operation"],
        )  # fmt: skip
        for operation, value in list(self._longest.items()):
            longest.add_metric([operation], value)
        yield longest
        for name, text, values in (
            ("seconds", "Processor time of requests in the event loop, by operation.", self._seconds),
            ("stalls", f"Times that a request held the event loop for more than {STALL_S:g} s.", self._stalls),
        ):
            family = CounterMetricFamily(f"localrun_loop_{name}", text, labels=["operation"])
            for operation, value in list(values.items()):
                family.add_metric([operation], value)
            yield family


def _operation(scope: Scope) -> str:
    return str(scope.get(OPERATION, "other"))


@contextmanager
def held(scope: Scope) -> Generator[None]:
    """In another thread: what runs inside keeps the interpreter's lock, and so the loop, all the time."""
    began_s = time.thread_time()
    try:
        yield
    finally:
        watch: LoopWatch | None = scope.get(WATCH)
        if watch is not None:
            seconds = time.thread_time() - began_s
            watch.took(scope, seconds, seconds)
            if seconds > STALL_S:
                watch.stalled(scope, seconds)


class _Watched:
    """Awaits a coroutine by hand, to see when each turn begins and ends."""

    __slots__ = ("_scope", "_serving", "_watch")

    def __init__(self, watch: LoopWatch, scope: Scope, serving: Coroutine[Any, Any, None]) -> None:
        self._watch = watch
        self._scope = scope
        self._serving = serving

    def __await__(self) -> Generator[Any, Any, None]:
        serving, clock, watch = self._serving, time.perf_counter, self._watch
        turn, total_s, longest_s = serving.send, 0.0, 0.0
        given: Any = None
        try:
            while True:
                began_s = clock()
                if began_s > watch.next_look_s:
                    watch.look(began_s)
                try:
                    waits_for = turn(given)
                except StopIteration:
                    return
                finally:
                    took_s = clock() - began_s
                    if took_s > LONG_S:
                        took_s = min(took_s, watch.look(began_s + took_s))
                        if took_s > STALL_S:
                            watch.stalled(self._scope, took_s)
                    total_s += took_s
                    if took_s > longest_s:
                        longest_s = took_s
                try:
                    yield waits_for
                    turn, given = serving.send, None
                except GeneratorExit:
                    serving.close()
                    raise
                except BaseException as thrown:
                    turn, given = serving.throw, thrown
        finally:
            given = waits_for = None  # an exception whose traceback has this frame would keep itself by them
            self._watch.took(self._scope, total_s, longest_s)


async def apart(work: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
    """What `work` returns. Work that grows with a request's body runs in a thread where that is large; whoever does it
    knows no request, so that stands in its context, as notices do. Raises what it raises."""
    return await asyncio.to_thread(work, *args, **named) if IS_LARGE.get() else work(*args, **named)
