"""The async HTTP client of a localrun daemon, used by the CLI, the TUI and the benchmark.

One client keeps its connections open and may run any number of calls at once from one event loop. A stream has no read
timeout, since a model may take minutes to load; ending or cancelling an iteration closes its connection at once, which
the daemon takes as a cancel. Every failure is one of `errors.py`: what the daemon refused as the class it was there,
a daemon that is not there or goes away as DaemonUnreachable.

Does not: start a daemon, retry, or go through a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx2
import msgspec

from localrun import __version__, errors
from localrun.access import discovery, trust
from localrun.access.trust import Endpoint
from localrun.config import in_short
from localrun.snapshot import (
    CacheCleared,
    CacheReport,
    LogLine,
    PullRow,
    RequestRow,
    Snapshot,
    TrafficRow,
    UsageReport,
)

# --- what a streamed answer is made of: lines of bytes, and the pieces that they carry ---

MAX_LINE_BYTES = 64 * 1024 * 1024
# Below, drafts made no difference that is worth a word.
LEAST_SPEEDUP = 1.05


class ChatMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and times of one answer, as the daemon measured them. `prompt_tokens` includes `cached_tokens`. Of
    `drafted_tokens` `accepted_tokens` are part of the answer; `speedup` is how many times as fast that made it."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    load_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    speedup: float = 1.0

    @property
    def speedup_text(self) -> str:
        """In words; empty for what nobody would notice."""
        return f"{self.speedup:.1f}x with drafts" if self.speedup >= LEAST_SPEEDUP else ""


class ChatPiece(msgspec.Struct, kw_only=True):
    """A part of an answer. The last one has `done` true and the metrics. `request_id` is what `Client.cancel` takes.
    `thinking` is what the model thought before it answered, `tool_calls` what it wants called, as `/api/chat` has them.
    `was_prompt_cut`, in the last one, says that the prompt was too long and lost a part of itself."""

    text: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = []
    done: bool = False
    request_id: str | None = None
    done_reason: str | None = None
    metrics: ChatMetrics | None = None
    was_prompt_cut: bool = False


class _Message(msgspec.Struct, frozen=True):
    content: str = ""
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Line(msgspec.Struct):
    """One line of an `/api/chat` stream. Durations are nanoseconds."""

    message: _Message = _Message()
    done: bool = False
    done_reason: str | None = None
    error: str | None = None
    code: str | None = None
    prompt_eval_count: int = 0
    prompt_eval_cached_count: int = 0
    eval_count: int = 0
    load_duration: int = 0
    prompt_eval_duration: int = 0
    eval_duration: int = 0
    total_duration: int = 0
    draft_count: int = 0
    draft_accepted_count: int = 0
    speedup: float = 1.0


def piece_of(line: bytes, request_id: str | None, *, was_cut: bool = False) -> ChatPiece:
    """The piece that a line carries. Raises the error that the daemon reports in it, and msgspec.DecodeError."""
    parsed = _line.decode(line)
    if parsed.error is not None:
        raise errors.by_code(parsed.code or errors.EngineFailed.code, parsed.error)
    said = parsed.message
    piece = ChatPiece(
        text=said.content, thinking=said.thinking or "", tool_calls=said.tool_calls or [], request_id=request_id
    )
    if parsed.done:
        piece.done, piece.done_reason, piece.was_prompt_cut = True, parsed.done_reason, was_cut
        piece.metrics = ChatMetrics(
            prompt_tokens=parsed.prompt_eval_count,
            cached_tokens=parsed.prompt_eval_cached_count,
            output_tokens=parsed.eval_count,
            load_s=parsed.load_duration / 1e9,
            prefill_s=parsed.prompt_eval_duration / 1e9,
            decode_s=parsed.eval_duration / 1e9,
            total_s=parsed.total_duration / 1e9,
            drafted_tokens=parsed.draft_count,
            accepted_tokens=parsed.draft_accepted_count,
            speedup=parsed.speedup,
        )
    return piece


class PullPiece(msgspec.Struct, kw_only=True):
    """A line of a pull: a new status, or how far one file is. `digest` may be empty where the source has none."""

    status: str = ""
    digest: str = ""
    total: int = 0
    completed: int = 0
    error: str | None = None
    code: str | None = None


def pull_piece_of(line: bytes) -> PullPiece:
    """The piece that a line carries. Raises the error that the daemon reports in it, and msgspec.DecodeError."""
    piece = _pull_line.decode(line)
    if piece.error is not None:
        raise errors.by_code(piece.code or errors.DownloadFailed.code, piece.error)
    return piece


class LineBuffer:
    """Cuts a stream of bytes into lines at line feeds alone: JSON text may contain every other character that Unicode
    calls a line end. A last line without its line feed was broken off and is never given out."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without empty ones. Raises DaemonUnreachable beyond `MAX_LINE_BYTES`."""
        self._pending += chunk
        if b"\n" in chunk:
            *lines, self._pending = self._pending.split(b"\n")
            return [bytes(line) for line in lines if line]
        if len(self._pending) > MAX_LINE_BYTES:
            raise errors.DaemonUnreachable(f"the daemon sent a line of more than {MAX_LINE_BYTES} bytes")
        return []


_line = msgspec.json.Decoder(_Line)
_pull_line = msgspec.json.Decoder(PullPiece)


# --- the HTTP side: connections to one daemon, and what its failures mean ---

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 30.0
# Below the daemon's own keep-alive of 5 s, so that the client is the one that closes an idle connection.
KEEPALIVE_EXPIRY_S = 3.0


class Connection:
    """Open from its first call until `close`. `name` is what the daemon's request table calls this client."""

    def __init__(self, base_url: str, *, name: str) -> None:
        self.base_url = base_url
        where = trust.endpoint_of(base_url)
        headers = {"User-Agent": f"{name}/{__version__}", "X-Localrun-Client": name, "Accept-Encoding": "identity"}
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S)
        self._http = httpx2.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx2.Timeout(REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=limits,
            # A proxy set for the web cannot reach a daemon on this machine.
            trust_env=False,
            auth=partial(_with_key, where),
            # On this machine it is plain HTTP, with nothing to verify; reading all authorities takes 16 ms.
            verify=False,
            transport=_ToMachine(where, limits) if where.is_remote else None,
        )

    async def close(self) -> None:
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        silence_s: float | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """An answer that comes in pieces, `silence_s` after each other at most. Raises the daemon's refusal, and
        DaemonUnreachable; so do things that go wrong while it is read within this context."""
        timeout = httpx2.Timeout(silence_s, connect=CONNECT_TIMEOUT_S)
        with self._reached():
            async with self._http.stream(
                method, path, content=_encoded(body), headers=_typed(headers, body), timeout=timeout
            ) as response:
                await _raise_refusal(response)
                yield response

    async def json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> dict[str, Any]:
        """As `call`, for an answer that is an object."""
        return await self.value(dict[str, Any], method, path, body, is_patient=is_patient)

    async def value(
        self, kind: type[T], method: str, path: str, body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> T:
        """As `call`, for an answer of this kind."""
        content = await self.call(method, path, body, is_patient=is_patient)
        with self._reached():
            return msgspec.json.decode(content, type=kind)

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> bytes:
        """A whole answer, which may take any time if `is_patient`. Raises as `stream` does."""
        timeout = httpx2.Timeout(None if is_patient else REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        with self._reached():
            response = await self._http.request(
                method, path, content=_encoded(body), headers=_typed(None, body), timeout=timeout
            )
            await _raise_refusal(response)
            return response.content

    async def form(self, path: str, fields: dict[str, str], filename: str, file: BinaryIO) -> dict[str, Any]:
        """A form with a file, sent as it is read, which may take any time. Raises as `stream` does."""
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        with self._reached():
            response = await self._http.post(path, data=fields, files={"file": (filename, file)}, timeout=timeout)
            await _raise_refusal(response)
            return msgspec.json.decode(response.content, type=dict[str, Any])

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turns what the transport raises into DaemonUnreachable."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise trust.untrusted(trust.endpoint_of(self.base_url)) from None
            if isinstance(error, httpx2.ConnectTimeout):
                raise errors.DaemonUnreachable(
                    f"{self.base_url} took no connection within {CONNECT_TIMEOUT_S:g} s; the machine is off or very "
                    f"busy, or a firewall lets nothing through"
                ) from None
            there = " there" if self.base_url.startswith("https") else ""
            raise errors.DaemonUnreachable(
                f"no daemon answers at {self.base_url}; `localrun serve` starts one{there}"
            ) from None
        except httpx2.HTTPError as error:
            reason = "it is silent" if isinstance(error, httpx2.TimeoutException) else "the connection broke"
            raise errors.DaemonUnreachable(f"the daemon at {self.base_url} went away: {reason}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.DaemonUnreachable(
                f"what answers at {self.base_url} is no localrun daemon, or one of another version ({error}); "
                f"`localrun version` shows both, `localrun stop --daemon` ends it"
            ) from None


class _ToMachine(httpx2.AsyncBaseTransport):
    """To another machine, by TLS, at the address that its name has now (`access/discovery.py`). Connections notice a
    network that is gone; the machine may have another address when it is back."""

    def __init__(self, where: Endpoint, limits: httpx2.Limits) -> None:
        self._where = where
        self._transport = httpx2.AsyncHTTPTransport(
            verify=trust.context_for(where), limits=limits, trust_env=False, socket_options=discovery.socket_options()
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        addresses = await asyncio.to_thread(discovery.addresses, self._where.host)
        for address in addresses[:-1]:
            with contextlib.suppress(httpx2.ConnectError, httpx2.ConnectTimeout):
                return await self._sent(request, address)
        try:
            return await self._sent(request, addresses[-1])
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            discovery.forget(self._where.host)
            renewed = await asyncio.to_thread(discovery.addresses, self._where.host)
            if renewed[0] in addresses:
                raise
            return await self._sent(request, renewed[0])

    async def _sent(self, request: httpx2.Request, address: str) -> httpx2.Response:
        """The body is sent after there is a connection, so a request that raises ConnectError can be sent again."""
        there = httpx2.Request(
            request.method, request.url.copy_with(host=address), headers=request.headers, stream=request.stream,
            extensions={**request.extensions, "sni_hostname": self._where.host},
        )  # fmt: skip
        return await self._transport.handle_async_request(there)

    async def aclose(self) -> None:
        await self._transport.aclose()


def _with_key(where: Endpoint, request: httpx2.Request) -> httpx2.Request:
    request.headers.update(trust.headers_for(where))
    return request


async def lines_of(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, to the end of its body: only then can the connection be used again."""
    lines = LineBuffer()
    async for chunk in response.aiter_raw():
        for line in lines.feed(chunk):
            yield line


async def _raise_refusal(response: httpx2.Response) -> None:
    """Raise the error that a response with an error status carries, as the class it had in the daemon."""
    if response.status_code < 400:
        return
    content = await response.aread()
    try:
        said = msgspec.json.decode(content, type=dict[str, Any]).get("error")
    except msgspec.DecodeError:
        said = None
    message = said.get("message") if isinstance(said, dict) else said
    code = response.headers.get("X-Localrun-Error", "")
    retry_after = response.headers.get("Retry-After", "")
    raise errors.by_code(
        code,
        str(message or f"HTTP status {response.status_code} from {response.url}"),
        retry_after_s=float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None,
    )


def _encoded(body: dict[str, Any] | None) -> bytes | None:
    try:
        return None if body is None else msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise errors.BadRequest(
            "the text contains half of a surrogate pair, or a path is not UTF-8; rename it then"
        ) from None


def _typed(headers: Mapping[str, str] | None, body: dict[str, Any] | None) -> dict[str, str]:
    return {**(headers or {}), **({} if body is None else {"Content-Type": "application/json"})}


# --- the client ---

# Events come at least once a second; a daemon silent for this long hangs.
EVENTS_TIMEOUT_S = 15.0


class Client:
    """An async context manager. `name` is what the daemon's request table calls this client."""

    def __init__(self, base_url: str, *, name: str = "localrun") -> None:
        self.base_url = base_url
        self._daemon = Connection(base_url, name=name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._daemon.close()

    async def chat(
        self,
        model: str,
        messages: list[dict[str, Any]],
        *,
        options: dict[str, Any] | None = None,
        think: bool | str | None = None,
        lane: str = "interactive",
        keep_alive: float | str | None = None,
        tools: list[dict[str, Any]] | None = None,
        answer_format: str | dict[str, Any] | None = None,
    ) -> AsyncGenerator[ChatPiece, None]:
        """Stream the answer to a conversation; `answer_format` is "json" or a JSON schema. Raises what the daemon
        refused, and DaemonUnreachable."""
        body = {
            "model": model, "messages": messages, "options": options, "think": think, "keep_alive": keep_alive,
            "tools": tools or None, "format": answer_format,
        }  # fmt: skip
        given = {name: value for name, value in body.items() if value is not None} | {"stream": True}
        done = False
        async with self._daemon.stream("POST", "/api/chat", given, headers={"X-Localrun-Lane": lane}) as response:
            request_id = response.headers.get("X-Localrun-Request")
            was_cut = "X-Localrun-Truncated" in response.headers
            async with aclosing(lines_of(response)) as lines:
                async for line in lines:
                    piece = piece_of(line, request_id, was_cut=was_cut)
                    done = done or piece.done
                    yield piece
        if not done:
            raise errors.DaemonUnreachable(f"the daemon at {self.base_url} broke off its answer")

    def events(self, hz: int = 4) -> AsyncGenerator[Snapshot, None]:
        """The daemon's state, `hz` (1 to 10) times a second, for ever. Raises DaemonUnreachable when it goes."""
        return self._told(f"/localrun/v1/events?hz={hz}", _snapshot, "event stream", silence_s=EVENTS_TIMEOUT_S)

    def logs(self, since: int = 0, *, follow: bool = True) -> AsyncGenerator[LogLine, None]:
        """The daemon's log: what is kept from after the line with this number, then, with `follow`, what comes. Raises
        DaemonUnreachable when the daemon goes."""
        path = f"/localrun/v1/logs?since={since}&follow={follow:d}"
        return self._told(path, _log_line, "log stream" if follow else "")

    def traffic(self, begun: Callable[[], object]) -> AsyncGenerator[TrafficRow, None]:
        """Requests that came after `begun` was called, as they end. Raises DaemonUnreachable when the daemon goes."""
        return self._told("/localrun/v1/traffic", _traffic_row, "stream of requests", begun=begun)

    async def _told(
        self,
        path: str,
        decoder: msgspec.json.Decoder[T],
        endless: str,
        *,
        silence_s: float | None = None,
        begun: Callable[[], object] = lambda: None,
    ) -> AsyncGenerator[T, None]:
        """The events of a stream; `endless` is what it is called, where it is not to end."""
        async with (
            self._daemon.stream("GET", path, silence_s=silence_s) as response,
            aclosing(lines_of(response)) as lines,
        ):
            begun()
            async for line in lines:
                if line.startswith(b"data:"):
                    yield decoder.decode(line[5:])
        if endless:
            raise errors.DaemonUnreachable(f"the daemon at {self.base_url} ended its {endless}")

    async def snapshot(self) -> Snapshot:
        """The daemon's state now."""
        return await self._daemon.value(Snapshot, "GET", "/localrun/v1/snapshot")

    async def request(self, request_id: str) -> RequestRow:
        """A request that runs or ended lately. Raises NotFound."""
        return await self._daemon.value(RequestRow, "GET", f"/localrun/v1/requests/{request_id}")

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when it is unknown or has ended."""
        try:
            await self._daemon.call("DELETE", f"/localrun/v1/requests/{request_id}")
        except (errors.NotFound, errors.Conflict):
            return False
        return True

    async def cache(self) -> CacheReport:
        """What is kept of each model's prompts."""
        return await self._daemon.value(CacheReport, "GET", "/localrun/v1/cache")

    async def clear_cache(self, model: str | None = None, *, ram: bool = True, disk: bool = True) -> CacheCleared:
        """Forget what is kept of one model's prompts, or of all, in memory, on disk or both."""
        query = {"model": model} if model is not None else {}
        if ram != disk:
            query["tier"] = "ram" if ram else "disk"
        return await self._daemon.value(CacheCleared, "DELETE", f"/localrun/v1/cache?{urlencode(query)}")

    async def usage(self, by: str = "key", days: int = 30) -> UsageReport:
        """What was used in the last days, by key, day or model; of all keys for who may see that."""
        return await self._daemon.value(UsageReport, "GET", f"/localrun/v1/usage?{urlencode({'by': by, 'days': days})}")

    async def models(self) -> list[dict[str, Any]]:
        """The rows of `/api/tags`, with short names: every model that can be loaded."""
        return _named_in_short((await self._daemon.value(_Models, "GET", "/api/tags")).models)

    async def loaded(self) -> list[dict[str, Any]]:
        """The rows of `/api/ps`, with short names: every model that is loaded."""
        return _named_in_short((await self._daemon.value(_Models, "GET", "/api/ps")).models)

    async def show(self, model: str, *, verbose: bool = False) -> dict[str, Any]:
        """What `/api/show` says of a model; if `verbose` with its tensors. Raises ModelNotFound."""
        return await self._daemon.json("POST", "/api/show", {"model": model} | ({"verbose": True} if verbose else {}))

    async def fit(self, model: str, draft: str = "") -> dict[str, Any]:
        """What `/localrun/v1/fit` says: how the model would be opened, and what each device would hold; with `draft`,
        beside that draft model instead of its own."""
        asked = {"model": model} | ({"draft": draft} if draft else {})
        return await self._daemon.json("GET", f"/localrun/v1/fit?{urlencode(asked)}")

    async def options(self) -> dict[str, Any]:
        """The options of a chat by name, each with the JSON schema of its values."""
        document = await self._daemon.json("GET", "/openapi.json")
        options: dict[str, Any] = document["components"]["schemas"]["Options"]["properties"]
        return options

    async def store(self) -> dict[str, Any]:
        """The whole of `/api/tags`: `models`, and `unusable` files with their problems."""
        return await self._daemon.json("GET", "/api/tags")

    async def remove(self, model: str) -> dict[str, Any]:
        """Remove a model: `freed_bytes`, the `deleted` files, those `kept` with the reason, and `notes`. Raises its
        refusal."""
        return await self._daemon.json("DELETE", "/api/delete", {"model": model})

    async def copy(self, source: str, destination: str) -> None:
        """Give a model a second name."""
        await self._daemon.call("POST", "/api/copy", {"source": source, "destination": destination})

    async def push(self, model: str) -> None:
        """Raises NotSupported."""
        await self._daemon.call("POST", "/api/push", {"model": model})

    async def collect_garbage(self, *, is_all: bool) -> dict[str, Any]:
        """Delete files that nobody needs: `freed_bytes`, the `deleted` files, the number of `kept_blobs`, and the
        `kept_partial_bytes` of interrupted pulls. Recent ones too if `is_all`."""
        body = {"min_age_s": 0, "partial_min_age_s": 0} if is_all else {}
        return await self._daemon.json("POST", "/localrun/v1/gc", body)

    async def create(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Make a model, by the body of `/api/create`: the lines that tell how it goes. Raises the daemon's refusal."""
        async with self._daemon.stream("POST", "/api/create", body) as response, aclosing(lines_of(response)) as lines:
            async for line in lines:
                said = msgspec.json.decode(line, type=dict[str, Any])
                if "error" in said:
                    raise errors.by_code(said.get("code", errors.EngineFailed.code), said["error"])
                yield said

    async def load(self, model: str) -> None:
        """Load a model and wait until it is ready."""
        await self._daemon.call("POST", "/api/generate", {"model": model, "stream": False}, is_patient=True)

    async def unload(self, model: str) -> None:
        """Unload a model, as soon as its running requests have ended."""
        body = {"model": model, "stream": False, "keep_alive": 0}
        await self._daemon.call("POST", "/api/generate", body, is_patient=True)

    async def pull(self, model: str, *, insecure: bool = False, projector: str = "") -> AsyncGenerator[PullPiece, None]:
        """Bring a model here, with its projector or the one that is named; ends after the piece `success`. Raises what
        the daemon refused or what went wrong."""
        done = False
        body = {"model": model, "insecure": insecure, **({"projector": projector} if projector else {})}
        async with self._daemon.stream("POST", "/api/pull", body) as response, aclosing(lines_of(response)) as lines:
            async for line in lines:
                piece = pull_piece_of(line)
                done = done or piece.status == "success"
                yield piece
        if not done:
            raise errors.DaemonUnreachable(f"the daemon at {self.base_url} broke off its answer")

    async def pulls(self) -> list[PullRow]:
        """The pulls that run, and the last ones that ended."""
        return (await self._daemon.value(_Pulls, "GET", "/localrun/v1/pulls")).pulls

    async def cancel_pull(self, model: str) -> None:
        """Cancel a pull, whoever asked for it. Raises NotFound when none runs."""
        await self._daemon.call("DELETE", f"/localrun/v1/pulls?{urlencode({'model': model})}")

    async def catalog(self, model: str | None = None) -> list[dict[str, Any]]:
        """The entries of the catalogue; with `model` the one that this name stands for, if there is one."""
        query = "" if model is None else "?" + urlencode({"model": model})
        return (await self._daemon.value(_Models, "GET", f"/localrun/v1/catalog{query}")).models

    async def search(self, query: str, *, limit: int = 20) -> dict[str, Any]:
        """Models to pull: `catalog` entries, `hub` repositories, and the `problem` that kept the latter away."""
        query_string = urlencode({"query": query, "limit": limit})
        return await self._daemon.json("GET", f"/localrun/v1/search?{query_string}", is_patient=True)

    async def upload(self, path: Path, *, purpose: str) -> dict[str, Any]:
        """Upload a file, as it is read: the row of `/v1/files`."""
        with path.open("rb") as file:
            return await self._daemon.form("/v1/files", {"purpose": purpose}, path.name, file)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises NotFound, and Conflict for one that a batch reads."""
        await self._daemon.call("DELETE", f"/v1/files/{quote(file_id, safe='')}")

    async def file_content(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """An uploaded file, or what a batch wrote. Raises NotFound."""
        async with self._daemon.stream("GET", f"/v1/files/{quote(file_id, safe='')}/content") as response:
            async for piece in response.aiter_raw():
                yield piece

    async def create_batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin a batch, by the body of `/v1/batches`."""
        return await self._daemon.json("POST", "/v1/batches", body)

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """A batch. Raises NotFound."""
        return await self._daemon.json("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    async def batches(self, *, limit: int = 20) -> list[dict[str, Any]]:
        """The batches, newest first."""
        return (await self._daemon.value(_Rows, "GET", f"/v1/batches?limit={limit}")).data

    async def cancel_batch(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch. Raises NotFound, and Conflict for one that has ended."""
        return await self._daemon.json("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    async def shutdown(self) -> None:
        """Ask the daemon to end. It may still be answering others when this returns."""
        await self._daemon.call("POST", "/localrun/v1/shutdown", {})


class _Models(msgspec.Struct):
    models: list[dict[str, Any]]


def _named_in_short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    named = ("name", "model")
    return [{key: in_short(value) if key in named else value for key, value in row.items()} for row in rows]


class _Rows(msgspec.Struct):
    data: list[dict[str, Any]]


class _Pulls(msgspec.Struct):
    pulls: list[PullRow]


_snapshot = msgspec.json.Decoder(Snapshot)
_log_line = msgspec.json.Decoder(LogLine)
_traffic_row = msgspec.json.Decoder(TrafficRow)
