"""One engine child process and its three pipes.

Runs in the daemon's event loop, with plain callbacks: a read of the pipe becomes frames by direct calls, without a task
between. stdout carries frames, stderr carries log lines, stdin carries frames to the child, and its end tells the child
that the daemon is gone, also after a `kill -9` of the daemon.

Invariants: `on_exit` is called once, after the last frame, within `PIPES_GRACE_S` of the child's end, and the child is
reaped by then; a child that breaks the framing or closes its stdout is killed, because nothing it says can be read.

Does not: know what the frames mean (link.py), or restart anything (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from localrun import framing
from localrun.processes import HIDDEN

PREFIX_BYTES = 4


class FrameBuffer:
    """Cuts a byte stream into frame bodies.

    A pipe delivers whatever it likes: half a length prefix, or forty frames at once. What is not yet a whole frame
    stays here, at most `framing.MAX_FRAME_BYTES` and one read.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes. Consume the iterator to its end before the next call.

        Raises framing.FrameError when a length beyond the limit is announced.
        """
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= PREFIX_BYTES:
                body_start = start + PREFIX_BYTES
                end = body_start + framing.body_length(bytes(self._bytes[start:body_start]))
                if end > len(self._bytes):
                    break
                # Before the yield: a body that its taker fails on must not come again.
                start = end
                yield bytes(self._bytes[body_start:end])
        finally:
            del self._bytes[:start]


PIPES_GRACE_S = 0.5
TERMINATE_GRACE_S = 3.0
MAX_LINE_BYTES = 4096

_STDIN, _STDOUT, _STDERR = 0, 1, 2


class EngineChild(asyncio.SubprocessProtocol):
    """See the module. `spawn` first; then `write`; `stop` at the end."""

    def __init__(
        self, *, on_body: Callable[[bytes], None], on_line: Callable[[str], None], on_exit: Callable[[int | None], None]
    ) -> None:
        self._on_body = on_body
        self._on_line = on_line
        self._on_exit = on_exit
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._frames = FrameBuffer()
        self._line = bytearray()
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self.frame_error: str | None = None

    @property
    def pid(self) -> int | None:
        return None if self._transport is None else self._transport.get_pid()

    @property
    def is_alive(self) -> bool:
        return self._transport is not None and not self._ended.is_set()

    async def spawn(self, argv: Sequence[str]) -> None:
        """Starts the child, in its own session: Ctrl-C in a terminal reaches the daemon alone. Raises OSError."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.subprocess_exec(
            lambda: self,
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            **HIDDEN,
        )
        self._transport = transport
        # uvloop's transports are not registered as subclasses of asyncio's.
        self._stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(_STDIN))

    def write(self, frame: bytes) -> None:
        """Queues a frame. A dead child's frames are dropped; `on_exit` tells."""
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(frame)

    async def writable(self) -> None:
        """Waits while more than the pipe's high-water mark is queued."""
        await self._writable.wait()

    def kill(self) -> None:
        if self._transport is not None and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    async def stop(self) -> None:
        """Ends the child: SIGTERM and end of stdin, SIGKILL after `TERMINATE_GRACE_S`. Returns when it is reaped. On
        Windows, where terminating is killing, the end of stdin alone."""
        if self._transport is None:
            return
        if not self._ended.is_set():
            if sys.platform != "win32":
                with contextlib.suppress(ProcessLookupError):
                    self._transport.terminate()
            if self._stdin is not None:
                self._stdin.close()
            try:
                await asyncio.wait_for(self._ended.wait(), TERMINATE_GRACE_S)
            except TimeoutError:
                self.kill()
        await self._ended.wait()

    # --- called by the event loop --------------------------------------------------------------------------------

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDERR:
            self._take_lines(data)
        elif self.frame_error is None:
            try:
                for body in self._frames.feed(data):
                    self._on_body(body)
            except framing.FrameError as error:
                self.frame_error = str(error)
                self.kill()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == _STDIN:
            self._writable.set()
        elif fd == _STDOUT:
            # An engine that ends closes this first; one that lives on without it can tell us nothing any more. (uvloop
            # reports the pipe's end together with the process's only; then the stall watch finds such an engine.)
            asyncio.get_running_loop().call_later(PIPES_GRACE_S, self.kill)

    def process_exited(self) -> None:
        # A grandchild that kept the pipes open must not hide the end.
        asyncio.get_running_loop().call_later(PIPES_GRACE_S, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- inside --------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._ended.is_set() or self._transport is None:
            return
        if self._line:
            self._emit_line()
        self._ended.set()
        self._writable.set()
        returncode = self._transport.get_returncode()
        self._transport.close()
        self._on_exit(returncode)

    def _take_lines(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._line += line[:MAX_LINE_BYTES]
            self._emit_line()
        self._line += rest[: max(0, MAX_LINE_BYTES - len(self._line))]

    def _emit_line(self) -> None:
        line = self._line[:MAX_LINE_BYTES].decode("utf-8", errors="replace").rstrip()
        self._line.clear()
        if line:
            self._on_line(line)
