"""The load generator: streaming requests against any server with OpenAI's API, with the times at which text arrived.

First the prompts, then an HTTP client that costs next to nothing, then the streams, then the open loop that begins them
at fixed times. One asyncio process holds all streams, so its own cost is small beside the server's. Times are
`time.perf_counter()`. A request that fails does not raise: its record says why.

Does not: start servers, or judge the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httptools
import msgspec

from localrun.access import discovery, trust
from localrun.bench.results import Options, StreamRecord, Target
from localrun.errors import BadRequest, DaemonUnreachable, LocalrunError

# --- prompts: the same seed gives the same prompt on every server, another label another prompt.
# A prompt is a list of numbers below 1,000, which a Wording turns into what the server understands: token ids where it
# takes them, so that a prompt has exactly as many tokens as it should, else words.

N_NUMBERS = 1000

# Ids below are control tokens and bytes in most vocabularies.
_FIRST_ID = 300
_FIRST_BYTE, _N_BYTES = 33, 94
# Each of them is one token in the usual vocabularies.
_WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")


class PromptForm(StrEnum):
    """How numbers become a prompt, the most exact way first."""

    IDS = "token ids"
    LOW_IDS = "token ids below 128"
    TEXT = "text"

    def prompt(self, numbers: Sequence[int]) -> list[int] | str:
        if self is PromptForm.IDS:
            return [_FIRST_ID + number for number in numbers]
        if self is PromptForm.LOW_IDS:
            return [_FIRST_BYTE + number % _N_BYTES for number in numbers]
        return " ".join(_WORDS[number % len(_WORDS)] for number in numbers)


def numbers(seed: int, label: str, count: int) -> list[int]:
    """`count` numbers below N_NUMBERS that belong to `seed` and `label`."""
    chosen = random.Random(f"{seed}/{label}")
    return [chosen.randrange(N_NUMBERS) for _ in range(count)]


# --- an HTTP client that costs next to nothing: asyncio's protocol and the C parser of httptools ---
# A load generator shares the machine with what it measures. A full client took 90 to 270 microseconds of a core per
# token here, as much as the daemon itself; this one is for measuring only.


class RequestRefused(LocalrunError):
    """The server answered with an HTTP error. `retry_after_s` is its Retry-After in seconds, where it gave one."""

    def __init__(self, http_status: int, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after_s = retry_after_s


async def post_stream(
    url: str, body: bytes, on_data: Callable[[bytes, float], None], headers: Mapping[str, str] | None = None
) -> None:
    """POST a JSON `body`; `on_data` gets each piece of the answer and the time (`perf_counter`) at which it came.

    Raises DaemonUnreachable when nobody listens, UntrustedCertificate, Refused for an HTTP error, LocalrunError for a
    connection that breaks, and BadRequest for a URL that is not HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise BadRequest(f"the load generator speaks HTTP, not {parts.scheme or 'this'}: {url}; use http://")
    where = trust.endpoint_of(url)
    loop = asyncio.get_running_loop()
    exchange = _HttpCall(loop.create_future(), on_data)
    try:
        transport, _ = await loop.create_connection(lambda: exchange, **await _place(where))
    except ssl.SSLCertVerificationError:
        raise trust.untrusted(where) from None
    except OSError as error:
        raise DaemonUnreachable(f"nothing answers at {where.host}:{where.port}: {error}") from error
    fields = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    transport.write(f"POST {parts.path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    try:
        await exchange.ended
    finally:
        transport.close()


async def _place(where: trust.Endpoint) -> dict[str, Any]:
    if not where.is_remote:
        return {"host": where.host, "port": where.port}
    [address, *_] = await asyncio.to_thread(discovery.addresses, where.host)
    return {"host": address, "port": where.port, "ssl": _tls(where), "server_hostname": where.host}


@functools.cache
def _tls(where: trust.Endpoint) -> ssl.SSLContext:
    """Once, for it reads all authorities of the system."""
    return trust.context_for(where)


class _HttpCall(asyncio.Protocol):
    """One request and its answer; the names of the `on_` methods are those that httptools calls."""

    def __init__(self, ended: asyncio.Future[None], on_data: Callable[[bytes, float], None]) -> None:
        self.ended = ended
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)
        self._retry_after_s: float | None = None
        self._has_length = False
        self._ends_by_closing = False
        self._problem = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self._end(LocalrunError(f"the server sent something that is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._ends_by_closing:
            self.on_message_complete()
        self._end(LocalrunError(f"the connection broke before the answer was complete: {exc or 'closed'}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length = self._has_length or name in (b"content-length", b"transfer-encoding")
        # It may also be a date; how long that is would depend on two clocks.
        if name == b"retry-after" and value.strip().isdigit():
            self._retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self._ends_by_closing = not self._has_length

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._on_data(body, time.perf_counter())
        else:
            self._problem += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._end(
            None if status == 200 else RequestRefused(status, _refusal(status, self._problem), self._retry_after_s)
        )

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _refusal(status: int, body: bytes) -> str:
    """The message within the error JSON of OpenAI's API, or the body as it is."""
    try:
        said = msgspec.json.decode(body, type=dict[str, object]).get("error")
    except msgspec.DecodeError:
        said = None
    message = said.get("message") if isinstance(said, dict) else said
    return f"status {status}: {message or body.decode(errors='replace')}"


# What a record says that the load generator itself ended.
CUT_SHORT = "cut short by the load generator"
# Who asks, where a workload does not say.
CLIENT = "bench"

# Of a request's body.
Fields: TypeAlias = Mapping[str, object]

_CLIENT_HEADER = "X-Localrun-Client"

_PREFIX = b"data:"
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Stream:
    """A request on its way. `record` fills while `task` runs."""

    record: StreamRecord
    task: asyncio.Task[StreamRecord]


class Endpoint:
    """A target as requests see it. `records` has every request in the order of sending.

    A server that does not know the headers with which localrun is told the client, the lane and the latency mode
    ignores them.
    """

    def __init__(self, target: Target, options: Options) -> None:
        self.target = target
        self.wording = PromptForm.IDS
        self.records: list[StreamRecord] = []
        self._tasks: set[asyncio.Task[StreamRecord]] = set()
        self._news = asyncio.Event()
        self._lane = options.lane
        self._headers = {
            name: value
            for name, value in (("X-Localrun-Latency", options.latency), ("X-Localrun-Lane", options.lane))
            if value
        } | trust.headers_for(trust.endpoint_of(target.base_url))
        self._timeout_s = options.request_timeout_s

    async def connect(self) -> None:
        """Find out how the target takes prompts, and have the model loaded on the way. Without this they are token ids.

        Raises DaemonUnreachable when nobody listens, and LocalrunError when it refuses two words of plain text
        or does not answer in time.
        """
        for wording in PromptForm:
            record = StreamRecord(intended_at_s=0.0, sent_at_s=0.0)
            # The highest number, so that ids beyond the vocabulary show here and not in the middle of a run. The answer
            # may be without text: a single token can be part of a character.
            prompt = wording.prompt([N_NUMBERS - 1] * 2)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await _stream(self.target, _exactly(prompt, 1), record, {**self._headers, _CLIENT_HEADER: CLIENT})
            except TimeoutError:
                raise LocalrunError(f"{self.target.base_url} did not answer in {self._timeout_s:g} s") from None
            except RequestRefused as error:
                # Another wording cures only what is wrong with the request.
                if wording is PromptForm.TEXT or error.http_status not in (400, 422):
                    raise
            else:
                self.wording = wording
                return

    def begin(
        self,
        numbers: Sequence[int],
        n_output: int,
        *,
        group: str = "",
        client: str = CLIENT,
        intended_at_s: float | None = None,
    ) -> Stream:
        """Send a prompt of these numbers now; the answer has exactly `n_output` tokens where the server obeys.

        `intended_at_s` is when it should have been sent, now if None.
        """
        now_s = time.perf_counter()
        record = StreamRecord(
            intended_at_s=now_s if intended_at_s is None else intended_at_s,
            sent_at_s=now_s,
            group=group,
            client=client,
            lane=self._lane,
            # Until the server's own count comes, with the end of the answer.
            n_prompt=0 if self.wording is PromptForm.TEXT else len(numbers),
        )
        return self._begin(record, _exactly(self.wording.prompt(numbers), n_output))

    async def send(
        self, numbers: Sequence[int], n_output: int, *, group: str = "", client: str = CLIENT
    ) -> StreamRecord:
        return await self.begin(numbers, n_output, group=group, client=client).task

    async def ask(self, body: Fields, *, group: str, client: str = CLIENT) -> StreamRecord:
        """Send a request of these fields, to chat completions if it has `messages`, and wait for its end."""
        now_s = time.perf_counter()
        record = StreamRecord(intended_at_s=now_s, sent_at_s=now_s, group=group, client=client, lane=self._lane)
        return await self._begin(record, body).task

    async def until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `is_so`, which is asked after every arrival and every end, but not longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    self._news.clear()
                    await self._news.wait()

    async def cut_all(self) -> None:
        """End from our side what is still on its way, as clients that go away do."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, record: StreamRecord, body: Fields) -> Stream:
        self.records.append(record)
        task = asyncio.create_task(self._run(record, body))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._end, record))
        return Stream(record, task)

    async def _run(self, record: StreamRecord, body: Fields) -> StreamRecord:
        headers = {**self._headers, _CLIENT_HEADER: record.client}
        try:
            async with asyncio.timeout(self._timeout_s):
                await _stream(self.target, body, record, headers, self._news.set)
            if not record.arrivals_s:
                record.problem = "the answer has no text"
        except TimeoutError:
            record.problem = f"no end after {self._timeout_s:g} s"
        except LocalrunError as error:
            record.problem = error.message
            if isinstance(error, RequestRefused):
                record.status, record.retry_after_s = error.http_status, error.retry_after_s
        return record

    def _end(self, record: StreamRecord, task: asyncio.Task[StreamRecord]) -> None:
        # Here and not in the task: one that is cancelled before its first step never runs.
        self._tasks.discard(task)
        self._news.set()
        record.ended_at_s = time.perf_counter()
        if task.cancelled():
            record.problem = CUT_SHORT


def _exactly(prompt: list[int] | str, n_output: int) -> Fields:
    """A greedy answer of so many tokens."""
    return {"prompt": prompt, "max_tokens": n_output, "temperature": 0, "ignore_eos": True}


async def _stream(
    target: Target,
    fields: Fields,
    record: StreamRecord,
    headers: dict[str, str],
    on_news: Callable[[], None] = lambda: None,
) -> None:
    """Fill the record; `on_news` is called whenever something was added. Raises LocalrunError for whatever prevents the
    whole answer."""
    body = {"model": target.model, **fields, "stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    rest = b""
    problem = ""

    def take(data: bytes, now_s: float) -> None:
        nonlocal rest, problem
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_PREFIX):
                continue
            event = line[len(_PREFIX) :].strip()
            if event != _DONE:
                try:
                    problem = _take(record, _decoder.decode(event), now_s) or problem
                except msgspec.DecodeError as error:
                    problem = problem or f"an event is not a completion chunk: {error}"
        on_news()

    await post_stream(target.base_url + path, msgspec.json.encode(body), take, headers)
    record.status = 200
    # Servers that send no usage send a token a piece.
    record.n_output = record.n_output or len(record.arrivals_s)
    if problem:
        raise LocalrunError(problem)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    cache_n: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: object = None


_decoder = msgspec.json.Decoder(_Chunk)


def _take(record: StreamRecord, chunk: _Chunk, now_s: float) -> str:
    """Put a chunk into the record. The error that it carries, or an empty text."""
    text = "".join(choice.text or (choice.delta and choice.delta.content) or "" for choice in chunk.choices)
    if text:
        record.arrivals_s.append(now_s)
        record.text += text
    if chunk.usage is not None:
        record.n_prompt, record.n_output = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            record.n_cached = details.cached_tokens
        elif chunk.timings is not None:
            record.n_cached = chunk.timings.cache_n
    if chunk.timings is not None:
        record.n_drafted, record.n_accepted = chunk.timings.draft_n, chunk.timings.draft_n_accepted
    if chunk.error is None:
        return ""
    return str(chunk.error.get("message", chunk.error)) if isinstance(chunk.error, dict) else str(chunk.error)


# --- the open loop: requests arrive by a clock of their own, not when the server is ready for more.
# A closed loop sends the next request when an answer is complete, so a slow server is asked less, and its queue is
# never seen.


def arrivals_s(*, rate_per_s: float, seconds: float, burstiness: float = 1.0, seed: int) -> list[float]:
    """Times in [0, seconds), ascending. Gaps are Gamma distributed with mean 1 / rate and shape `burstiness`.

    A shape of 1 makes a Poisson process; below 1 arrivals come in bursts, above they get regular.
    """
    chosen = random.Random(seed)
    at_s = 0.0
    times: list[float] = []
    while True:
        at_s += chosen.gammavariate(burstiness, 1 / (rate_per_s * burstiness))
        if at_s >= seconds:
            return times
        times.append(at_s)


async def open_loop(arrivals_s: Sequence[float], begin: Callable[[int, float], Stream]) -> list[StreamRecord]:
    """Call `begin(index, intended_at_s)` at each of the times (seconds from now) and wait for all answers.

    A request that is sent late, because this process was busy, is still measured from when it should have been.
    """
    start_s = time.perf_counter()
    streams = []
    for index, arrival_s in enumerate(arrivals_s):
        await asyncio.sleep(max(0.0, start_s + arrival_s - time.perf_counter()))
        streams.append(begin(index, start_s + arrival_s))
    return list(await asyncio.gather(*(stream.task for stream in streams)))
