"""The MCP servers while they run, by the official SDK: started when first wanted, asked for their tools, called, ended.

Owner: a thread with an event loop of its own, because the SDK takes a second to import, parses whatever a server sends,
and has to be served while the caller waits for a person at a prompt. Methods are called from any other loop; cancelling
one cancels the call at its server (MCP's `notifications/cancelled`).

A server's program runs below `guard.py`. What it prints to standard error is kept to its last lines and never reaches
the terminal. Whatever a server does ends in `ServerFailed` or in a result that says so.

Does not: decide what may run. No other module imports `mcp`. Servers get neither the model (sampling), nor questions to
the person (elicitation), nor folders (roots).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
import json
import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec

from localrun import __version__
from localrun.attachments import Kind, media_kind
from localrun.errors import LocalrunError
from localrun.tools.config import ServerSettings, expanded
from localrun.visible import inert, last_words, shortened

MAX_TOOLS = 128
MAX_PAGES = 16
MAX_NAME_CHARS = 128
MAX_DESCRIPTION_CHARS = 2_000
MAX_SCHEMA_CHARS = 20_000
MAX_IMAGES = 4
MAX_IMAGE_BYTES = 16 * 1024 * 1024
MAX_REASON_CHARS = 300
KEPT_LINES = 40
# For ending all servers; the guard has killed them before.
CLOSE_TIMEOUT_S = 8.0
LAST_WORDS_S = 1.0
_GUARD = Path(__file__).with_name("guard.py")

T = TypeVar("T")


class ServerFailed(LocalrunError):
    """A server that cannot be started or reached, or that has ended; the message says why."""

    code = "tools_unavailable"


class ServerTool(msgspec.Struct, frozen=True):
    """A tool as its server describes it, without control characters."""

    name: str
    description: str
    schema: dict[str, Any]


class Result(msgspec.Struct, frozen=True):
    """What a call gave, already as short as the model gets it. `pictures` are files as their bytes."""

    text: str
    is_error: bool = False
    pictures: tuple[bytes, ...] = ()


class Servers:
    """`settings` by name. Starts nothing by itself."""

    def __init__(self, settings: Mapping[str, ServerSettings]) -> None:
        self.settings = dict(settings)
        self._running: dict[str, _Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def is_running(self, name: str) -> bool:
        """Whether it was started and has not ended."""
        return name in self._running and self._running[name].is_ready

    async def tools(self, name: str) -> tuple[ServerTool, ...]:
        """What a server offers, which is started if need be. Raises ServerFailed."""
        return await self._there(self._tools(name))

    async def call(self, name: str, tool: str, arguments: dict[str, Any]) -> Result:
        """The result of a call; what goes wrong with it is a result as well."""
        try:
            return await self._there(self._call(name, tool, arguments))
        except ServerFailed as error:
            return Result(error.message, is_error=True)

    async def close(self) -> None:
        """Ends all servers. They may be started again."""
        if self._loop is None or self._thread is None:
            return
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        with suppress(TimeoutError):
            ending = asyncio.run_coroutine_threadsafe(self._close(), loop)
            await asyncio.wait_for(asyncio.wrap_future(ending), CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, 1.0)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """In the thread, which is started with the first work."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="mcp", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # --- in the thread ---

    async def _tools(self, name: str) -> tuple[ServerTool, ...]:
        was_running = self.is_running(name)
        try:
            return await (await self._ready(name)).tools()
        except ServerFailed:
            if not was_running:
                raise
        return await (await self._ready(name)).tools()  # it had ended unnoticed

    async def _call(self, name: str, tool: str, arguments: dict[str, Any]) -> Result:
        return await (await self._ready(name)).call(tool, arguments)

    async def _ready(self, name: str) -> _Server:
        server = self._running.get(name)
        if server is None or server.is_over:
            server = self._running[name] = _Server(name, self.settings[name])
            self._tasks.add(server.task)
            server.task.add_done_callback(self._tasks.discard)
        # Shielded: who is not willing to wait any longer does not end it for others.
        await asyncio.shield(server.started)
        return server

    async def _close(self) -> None:
        for server in self._running.values():
            server.end()
        self._running.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(lambda _loop, context: _log.debug("%s", context.get("message")))
    try:
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


_log = logging.getLogger("localrun.tools")


class _Server:
    """One connection. `started` ends with the connection or with ServerFailed."""

    def __init__(self, name: str, settings: ServerSettings) -> None:
        self._name = name
        self._settings = settings
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._client: Any = None
        self._scope: Any = None
        self._is_ending = False
        self._listener: threading.Thread | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.task = asyncio.create_task(self._run())

    @property
    def is_ready(self) -> bool:
        return self.started.done() and not self.is_over

    @property
    def is_over(self) -> bool:
        return self._is_ending or self.task.done()

    def end(self) -> None:
        self._is_ending = True
        if self._scope is not None:
            self._scope.cancel()

    async def tools(self) -> tuple[ServerTool, ...]:
        """As of now: not every server says when they change."""
        try:
            return await self._listed()
        except Exception as error:
            raise await self._failed(error) from None

    async def call(self, tool: str, arguments: dict[str, Any]) -> Result:
        from mcp import MCPError
        from mcp.types import REQUEST_TIMEOUT

        timeout_s = self._settings.timeout_s
        try:
            found = await self._client.call_tool(tool, arguments, read_timeout_seconds=timeout_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                said = f"the tool gave no answer within {timeout_s:g} s, and the call was cancelled"
                return Result(said, is_error=True)
            if not self._is_answer(error):
                raise await self._failed(error) from None
            return Result(self._cut(inert(error.message)), is_error=True)
        except Exception as error:  # of a result that is not what its schema says, too
            if self._client is None:
                raise await self._failed(error) from None
            return Result(self._cut(inert(f"{type(error).__name__}: {error}")), is_error=True)
        return self._result(found)

    async def _run(self) -> None:
        try:
            await self._connect_and_stay()
        except BaseException as error:
            self._client = None
            if not self.started.done():
                self.started.set_exception(await self._failed(error))
            if not isinstance(error, Exception):
                raise
        finally:
            self._client = None
            if not self.started.done():
                self.started.set_exception(self._why("was ended"))

    async def _connect_and_stay(self) -> None:
        import anyio
        import mcp
        from mcp.types import Implementation

        logging.getLogger("mcp").addHandler(logging.NullHandler())
        logging.getLogger("mcp").propagate = False
        timeout_s = self._settings.timeout_s
        with anyio.CancelScope(deadline=anyio.current_time() + timeout_s) as self._scope:
            async with AsyncExitStack() as stack:
                client = mcp.Client(
                    await self._transport(stack),
                    client_info=Implementation(name="localrun", version=__version__),
                    cache=None,
                )
                self._client = await stack.enter_async_context(client)
                if self._is_ending:
                    return
                self._scope.deadline = math.inf
                self.started.set_result(None)
                await asyncio.get_running_loop().create_future()
        if not self.started.done() and not self._is_ending:
            self.started.set_exception(self._why(f"did not answer within {timeout_s:g} s"))

    async def _transport(self, stack: AsyncExitStack) -> Any:
        settings = self._settings
        if settings.url:
            from mcp.client.streamable_http import streamable_http_client

            client = await stack.enter_async_context(http_client(settings))
            return streamable_http_client(settings.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES)
        from mcp import StdioServerParameters, stdio_client

        command = [settings.command, *(expanded(argument, os.environ) for argument in settings.args)]
        if sys.platform != "win32":
            command = [sys.executable, "-I", "-S", str(_GUARD), *command]
        folder = await asyncio.to_thread(Path(settings.cwd).expanduser) if settings.cwd else None
        parameters = StdioServerParameters(
            command=command[0],
            args=command[1:],
            env={name: expanded(value, os.environ) for name, value in settings.env.items()},
            cwd=folder,
            encoding_error_handler="replace",
        )
        reading, writing = os.pipe()
        self._listener = threading.Thread(target=self._listen, args=(reading,), name=f"mcp-{self._name}", daemon=True)
        self._listener.start()
        return stdio_client(parameters, errlog=stack.enter_context(os.fdopen(writing, "w")))

    def _listen(self, descriptor: int) -> None:
        """Keeps the last lines of standard error. A thread: it reads until the last of the server's processes ends."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pending = ""
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            while data := stream.read(4096):
                *lines, pending = (pending + decoder.decode(data)).split("\n")
                pending = pending[:MAX_REASON_CHARS]
                self._said.extend(line.rstrip()[:MAX_REASON_CHARS] for line in lines if line.strip())

    async def _listed(self) -> tuple[ServerTool, ...]:
        found: list[ServerTool] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await asyncio.wait_for(self._client.list_tools(cursor=cursor), self._settings.timeout_s)
            found += [tool for tool in map(_offered, page.tools) if tool is not None]
            cursor = page.next_cursor
            if not cursor or len(found) >= MAX_TOOLS:
                break
        return tuple(found[:MAX_TOOLS])

    def _result(self, found: Any) -> Result:
        texts: list[str] = []
        pictures: list[bytes] = []
        for content in found.content:
            picture = _picture(content)
            if picture is not None and len(pictures) < MAX_IMAGES:
                pictures.append(picture)
            else:
                texts.append(_text(content))
        if not found.content and found.structured_content is not None:
            texts.append(json.dumps(found.structured_content, ensure_ascii=False))
        text = self._cut(inert("\n".join(texts)))
        return Result(text, found.is_error, tuple(pictures))

    def _cut(self, text: str) -> str:
        most = self._settings.max_result_chars
        if len(text) <= most:
            return text
        return f"{text[:most]}\n[localrun cut this result: the first {most} of {len(text)} characters]"

    def _is_answer(self, error: BaseException) -> bool:
        """Whether an error is the server's, and not that the connection has ended. Servers use the code of the latter
        for errors of their own: it is the first of those that JSON-RPC leaves to them."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if not isinstance(error, MCPError):
            return False
        return error.code != CONNECTION_CLOSED or not (self._settings.url or error.message == "Connection closed")

    async def _failed(self, error: BaseException) -> ServerFailed:
        """Ends the connection: why. A program's last words on standard error come a little later than its end."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ServerFailed):
            return error
        if isinstance(error, ModuleNotFoundError):
            reason = f"needs the Python package {error.name}, which is not installed"
        elif isinstance(error, LocalrunError):
            reason = error.message
        elif self._settings.url:
            # No more of its address: there may be secrets in it, and this goes to the model and into the chat.
            host = urlsplit(self._settings.url).netloc.rpartition("@")[2]
            said = str(error).replace(self._settings.url, host) or type(error).__name__
            reason = f"cannot be reached at {host}: {said}"
        elif isinstance(error, TimeoutError):
            reason = f"did not answer within {self._settings.timeout_s:g} s"
        elif isinstance(error, OSError):
            reason = f"cannot be started: {error}"
        elif isinstance(error, (ValueError, RuntimeError)) or self._is_answer(error):  # ValueError: no valid message
            reason = f"cannot be used: {' '.join(str(error).split())}"
        else:
            reason = "has ended"
        self.end()
        if self.task is not asyncio.current_task():
            await asyncio.wait({self.task}, timeout=CLOSE_TIMEOUT_S)
        if self._listener is not None:
            await asyncio.to_thread(self._listener.join, LAST_WORDS_S)
        return self._why(reason)

    def _why(self, reason: str) -> ServerFailed:
        words = last_words(inert(line) for line in self._said)
        said = f"; it said: {words}" if words else ""
        return ServerFailed(f"the server {self._name} {shortened(inert(reason) + said, MAX_REASON_CHARS)}")


def _offered(tool: Any) -> ServerTool | None:
    """None for one that no model should be shown: what a name or a schema may be has limits."""
    schema = tool.input_schema or {}
    if len(tool.name) > MAX_NAME_CHARS or len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        return None
    description = shortened(inert(tool.description or ""), MAX_DESCRIPTION_CHARS)
    return ServerTool(tool.name, description, _inert_values(schema))


def _inert_values(tree: Any) -> Any:
    if isinstance(tree, str):
        return inert(tree)
    if isinstance(tree, dict):
        return {inert(str(name)): _inert_values(value) for name, value in tree.items()}
    return [_inert_values(value) for value in tree] if isinstance(tree, list) else tree


def _picture(content: Any) -> bytes | None:
    if content.type != "image" or len(content.data) > MAX_IMAGE_BYTES * 4 // 3:
        return None
    try:
        data = base64.b64decode(content.data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if media_kind(data) is Kind.PICTURE else None


def _text(content: Any) -> str:
    """What the model reads of a part of a result."""
    if content.type == "text":
        return str(content.text)
    if content.type == "resource":
        resource = content.resource
        text = getattr(resource, "text", None)
        return f"[{resource.uri}]\n{text}" if text is not None else f"[{resource.uri}: a file that is no text]"
    if content.type == "resource_link":
        return f"[a link to {content.uri}]"
    return f"[{content.type} {getattr(content, 'mime_type', '')}: left out]"


# As the guard's for programs. Events of a stream have this limit, too, by the MCP library.
MAX_MESSAGE_BYTES = 32_000_000


def http_client(settings: ServerSettings) -> httpx2.AsyncClient:
    """Raises BadRequest for a variable that is not set."""
    headers = {name: expanded(value, os.environ) for name, value in settings.headers.items()}
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **headers},  # so that the bytes that come are all there is
        # A call's own time limit counts, and a stream of notifications may be silent for hours.
        timeout=httpx2.Timeout(settings.timeout_s, read=None),
        event_hooks={"response": [_bound]},
    )


async def _bound(response: httpx2.Response) -> None:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise httpx2.StreamError("it sends compressed answers although it was asked not to")
    if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _LimitedStream(response.stream)


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size_bytes = 0
        async for data in self._stream:
            size_bytes += len(data)
            if size_bytes > MAX_MESSAGE_BYTES:
                raise httpx2.StreamError(f"it sent a message of more than {MAX_MESSAGE_BYTES // 1_000_000} MB")
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()
