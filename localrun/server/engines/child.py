"""One engine child process and its three pipes, and what a link needs of any engine, wherever it runs (`Child`).

Runs in the daemon's event loop, with plain callbacks: a read of the pipe becomes messages by direct calls, without a
task between. stdout carries frames, stderr carries log lines, stdin carries frames to the child, and its end tells the
child that the daemon is gone, also after a `kill -9` of the daemon.

Invariants: `on_end` is called once, after the last message, within `PIPES_GRACE_S` of the child's end, and the child is
reaped by then; a child that breaks the framing or closes its stdout is killed, because nothing it says can be read.

Does not: know what the messages mean (link.py), or restart anything (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol, cast

import msgspec

from localrun import framing, wire
from localrun.processes import HIDDEN, end_in_words, is_crash, signal_of
from localrun.server.engines import machine

PREFIX_BYTES = 4


class EndKind(StrEnum):
    """What ended an engine: native code failed, maybe at an instruction that the processor lacks; SIGKILL, by the
    kernel for memory as far as one knows, or not by it; somebody's wish; what it said could not be read; or it left
    by itself."""

    CRASHED = "crashed"
    BAD_INSTRUCTION = "bad_instruction"
    KILLED = "killed"
    KILLED_BY_OTHERS = "killed_by_others"
    ENDED_BY_OTHERS = "ended_by_others"
    BROKE_PROTOCOL = "broke_protocol"
    EXITED = "exited"


class End(msgspec.Struct, frozen=True):
    """How an engine ended, as whoever watched it has found. `how` goes on from "the engine of model 'm'"."""

    kind: EndKind
    how: str

    @property
    def is_crash(self) -> bool:
        return self.kind in (EndKind.CRASHED, EndKind.BAD_INSTRUCTION)

    @property
    def is_kill(self) -> bool:
        return self.kind in (EndKind.KILLED, EndKind.KILLED_BY_OTHERS)

    @property
    def is_by_others(self) -> bool:
        """Whether somebody outside ended it, which says nothing about what it did."""
        return self.kind in (EndKind.KILLED_BY_OTHERS, EndKind.ENDED_BY_OTHERS)


class Child(Protocol):
    """An engine as its link knows it. What it says, and its end, come by the callbacks that it was made with: see
    `NewChild`."""

    @property
    def pid(self) -> int | None: ...
    async def spawn(self, argv: Sequence[str]) -> None:
        """Start it. Raises OSError."""

    def write(self, message: wire.ToEngine) -> None:
        """Queue a message; an engine that is gone takes none. Raises framing.FrameTooLarge."""

    async def writable(self) -> None:
        """Wait while too much is queued."""

    def kill(self) -> None: ...
    async def stop(self) -> None:
        """End it, and return when it is gone."""


class NewChild(Protocol):
    """Makes a child. It calls `on_message` in the order in which the engine spoke, `on_line` for its log, and `on_end`
    once, last of all."""

    def __call__(
        self,
        *,
        on_message: Callable[[wire.FromEngine], None],
        on_line: Callable[[str], None],
        on_end: Callable[[End], None],
    ) -> Child: ...


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
_KILLED = -9  # the signal has no name on Windows
# The ends of engines that others ended: status 0, with which they leave at SIGTERM, or SIGHUP, SIGINT or SIGTERM.
_SIGNALS_OF_OTHERS = frozenset({1, 2, 15})

_STDIN, _STDOUT, _STDERR = 0, 1, 2


class EngineChild(asyncio.SubprocessProtocol):
    """See the module. `spawn` first; then `write`; `stop` at the end."""

    def __init__(
        self,
        *,
        on_message: Callable[[wire.FromEngine], None],
        on_line: Callable[[str], None],
        on_end: Callable[[End], None],
    ) -> None:
        self._on_message = on_message
        self._on_line = on_line
        self._on_end = on_end
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._frames = FrameBuffer()
        self._line = bytearray()
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self._frame_error: str | None = None
        self._n_oom_kills: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self._transport is None else self._transport.get_pid()

    @property
    def is_alive(self) -> bool:
        return self._transport is not None and not self._ended.is_set()

    async def spawn(self, argv: Sequence[str]) -> None:
        """Starts the child, in its own session: Ctrl-C in a terminal reaches the daemon alone. Raises OSError."""
        self._n_oom_kills = machine.oom_kills()
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

    def write(self, message: wire.ToEngine) -> None:
        """Queues a message. Those for a dead child are dropped; `on_end` tells. Raises framing.FrameTooLarge."""
        frame = framing.encode(message)
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
        elif self._frame_error is None:
            try:
                for body in self._frames.feed(data):
                    self._on_message(framing.decode_from_engine(body))
            except framing.FrameError as error:
                self._frame_error = str(error)
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
        self._on_end(self._verdict(returncode))

    def _verdict(self, returncode: int | None) -> End:
        how = end_in_words(returncode)
        if self._frame_error is not None:
            return End(EndKind.BROKE_PROTOCOL, f"broke the protocol ({self._frame_error})")
        if signal_of(returncode) == signal.SIGILL:
            return End(EndKind.BAD_INSTRUCTION, how)
        if is_crash(returncode):
            return End(EndKind.CRASHED, how)
        if returncode == _KILLED:  # not by the kernel for memory, where that is known: a request can be why that ends
            is_by_others = self._n_oom_kills is not None and machine.oom_kills() == self._n_oom_kills
            return End(EndKind.KILLED_BY_OTHERS if is_by_others else EndKind.KILLED, how)
        is_by_others = returncode == 0 or signal_of(returncode) in _SIGNALS_OF_OTHERS
        return End(EndKind.ENDED_BY_OTHERS if is_by_others else EndKind.EXITED, how)

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
