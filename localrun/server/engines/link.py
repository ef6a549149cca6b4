"""The conversation with one engine: requests out, the news of every step in; and the process at its other end, where it
is one of this machine (`EngineChild`).

Runs in the daemon's event loop. One message per step comes in; each delta goes to its job by a plain call.

Invariants: request ids are never reused on a link; every sink gets a final delta or `on_engine_gone`, once; after
`on_engine_gone` nothing is called. When an engine ends unasked, all its jobs are told so with EngineDied at that
moment, and which of them it may have died of.

Jobs whose engine died come one at a time: each holds `turn` until it has got something new, and others wait for it.
If the engine dies during that turn, only that request is blamed. If something else ended the engine, none is.

Does not: choose what to load or when (supervisor.py), or keep deltas (job.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

import msgspec

from localrun import framing, wire
from localrun.errors import BadModelFile, EngineDied, EngineFailed, LocalrunError, TooLarge, Unavailable, by_code
from localrun.hardware import kernels
from localrun.processes import HIDDEN, end_in_words, is_crash, signal_of
from localrun.server.engines import machine
from localrun.snapshot import KvRunRow, LongStepRow

KEPT_LINES = 20
# A step on a device that takes longer is at something else: its driver compiles kernels when they are first used.
PREPARING_AFTER_S = 5.0
# As long as it is worth asking what a step took long for.
LONG_STEPS_S = 600.0

Answer = TypeVar("Answer", wire.Counted, wire.Cleared)

_log = logging.getLogger("localrun.engine")


class RequestRecord(Protocol):
    """What a link uses of a request's record, which is a `Generation` (`jobs/generation.py`)."""

    has_shown: bool
    node: str

    @property
    def has_begun(self) -> bool: ...
    @property
    def is_on_trial(self) -> bool: ...


class Sink(Protocol):
    """Takes what an engine says of one request: its job. People know the request as `id`."""

    @property
    def id(self) -> str: ...
    @property
    def record(self) -> RequestRecord: ...

    def on_started(self, started: wire.Started) -> None: ...
    def on_delta(self, delta: wire.Delta, sent_at_s: float) -> None: ...
    def on_engine_gone(self, error: LocalrunError, *, is_blamed: bool, is_alone: bool) -> bool: ...


class EndKind(StrEnum):
    """What ended an engine: native code crashed, perhaps at an instruction that the processor lacks; it got a SIGKILL,
    from the kernel for lack of memory as far as is known, or from somebody else; somebody asked it to end; its messages
    could not be read; or it exited by itself."""

    CRASHED = "crashed"
    BAD_INSTRUCTION = "bad_instruction"
    KILLED = "killed"
    KILLED_BY_OTHERS = "killed_by_others"
    ENDED_BY_OTHERS = "ended_by_others"
    BROKE_PROTOCOL = "broke_protocol"
    EXITED = "exited"


class End(msgspec.Struct, frozen=True):
    """How an engine ended, as far as its child could tell. `how` continues "the engine of model 'm'"."""

    kind: EndKind
    how: str

    @property
    def is_crash(self) -> bool:
        return self.kind in (EndKind.CRASHED, EndKind.BAD_INSTRUCTION)

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


PIPES_GRACE_S = 0.5
TERMINATE_GRACE_S = 3.0
MAX_LINE_BYTES = 4096
_KILLED = -9  # the signal has no name on Windows
# The ends of engines that others ended: status 0, with which they leave at SIGTERM, or SIGHUP, SIGINT or SIGTERM.
_SIGNALS_OF_OTHERS = frozenset({1, 2, 15})

_STDIN, _STDOUT, _STDERR = 0, 1, 2


class EngineChild(asyncio.SubprocessProtocol):
    """An engine process and its three pipes. `spawn` first; then `write`; `stop` at the end.

    Works with plain callbacks of the event loop: a read of the pipe becomes messages by direct calls, without a task
    between. stdout carries frames, stderr carries log lines, stdin carries frames to the child, and its end tells the
    child that the daemon is gone, also after a `kill -9` of the daemon.

    Invariants: `on_end` is called once, after the last message, within `PIPES_GRACE_S` of the child's end, and the
    child is reaped by then; a child that breaks the framing or closes its stdout is killed, because nothing it says can
    be read.
    """

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
        self._frames = framing.FrameBuffer()
        self._line = bytearray()
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self._frame_error: str | None = None
        self._n_oom_kills: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self._transport is None else self._transport.get_pid()

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


# The argv of an engine. `-P` keeps modules lying in the current folder from being imported.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "localrun.engine.process")


class EngineLink:
    """See the module. `on_end` is called when the engine is gone, however it went; `on_answered` when something was
    computed for the first time. The engine is a process here, unless `new_child` makes something else. Links that take
    requests from one to the other have one source of `ids`."""

    ready: wire.Ready

    def __init__(
        self,
        *,
        model: str,
        command: Sequence[str],
        on_step: Callable[[EngineLink, wire.Step], None],
        on_end: Callable[[EngineLink], None],
        on_answered: Callable[[EngineLink], None] = lambda link: None,
        new_child: NewChild = EngineChild,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.model = model
        self.stats: wire.StepStats | None = None
        self.error: LocalrunError | None = None
        # When it was last heard, or given something to do after it had nothing.
        self.last_frame_s = time.monotonic()
        self._command = command
        self._on_step = on_step
        self._on_end = on_end
        self._on_answered = on_answered
        self._child = new_child(on_message=self._on_message, on_line=self._on_line, on_end=self._on_child_end)
        self.turn = asyncio.Lock()
        self.has_answered = False
        self.end: End | None = None
        # How it crashed, if it did: of a damaged file, a wrong kernel, or a bug.
        self.crash: str | None = None
        # Whether somebody outside ended it, which says nothing about what it did.
        self.was_killed = False
        # Requests that it died over, and texts that it was tokenizing; and whether all of them go on on another one.
        self.n_at_work = 0
        self.is_survived_by_all = False
        self._ids = itertools.count(1) if ids is None else ids
        self._opened: asyncio.Future[wire.Ready] | None = None
        # The record of the request that runs in each slot, or ran there last.
        self.last_in_slot: dict[int, Any] = {}
        self._sinks: dict[int, Sink] = {}
        self._counts: dict[int, asyncio.Future[wire.Counted]] = {}
        self._clearings: dict[int, asyncio.Future[wire.Cleared]] = {}
        self._queue: list[int] = []
        self._waits_s: list[float] | None = None
        self._queue_at_s = 0.0
        self._kv_map: list[wire.KvRun] = []
        # By the engine's minute.
        self._long_steps: dict[int, LongStepRow] = {}
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._is_ready = False
        self._is_stopping = False
        self._kill_reason: str | None = None

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def is_loading(self) -> bool:
        """Whether it was asked to load the model, and has not answered yet."""
        return self._opened is not None and not self._opened.done()

    @property
    def n_outstanding(self) -> int:
        """Requests, counts and clearings that the engine still owes an answer."""
        return len(self._sinks) + len(self._counts) + len(self._clearings)

    @property
    def n_requests(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._sinks)

    @property
    def is_on_device(self) -> bool:
        return self._is_ready and self.ready.n_gpu_layers > 0

    @property
    def is_preparing(self) -> bool:
        """Whether its device is being prepared for what it has to compute, as far as one can tell from outside."""
        is_silent = time.monotonic() - self.last_frame_s > PREPARING_AFTER_S
        return self.is_on_device and self.n_requests > 0 and is_silent

    @property
    def died(self) -> bool:
        """Whether it ended without being asked to."""
        return self.error is not None and not self._is_stopping

    # --- life ----------------------------------------------------------------------------------------------------

    async def open(self, message: wire.Open, timeout_s: float) -> wire.Ready:
        """Starts the process and loads the model.

        Raises the engine's own refusal, BadModelFile when native code crashed on the file, EngineDied when the process
        ended otherwise, EngineFailed when it took longer than `timeout_s`. After an error no process is left.
        """
        self._opened = asyncio.get_running_loop().create_future()
        self.last_frame_s = time.monotonic()
        try:
            await self._child.spawn(self._command)
            self._child.write(message)
            await asyncio.wait_for(self._opened, timeout_s)
        except TimeoutError:
            self.kill(f"did not load the model within {timeout_s:g} seconds (setting load_timeout_s)")
            raise EngineFailed(
                f"loading '{self.model}' took longer than {timeout_s:g} seconds; raise load_timeout_s if the disk or "
                f"the machine is that slow"
            ) from None
        except OSError as error:
            problem = kernels.NO_THREADS.line if kernels.has_no_threads(str(error)) else error
            raise EngineFailed(f"the engine process could not be started: {problem}") from error
        finally:
            if not self._is_ready:
                self._opened.cancel()
                await self.stop()
        return self.ready

    async def stop(self) -> None:
        """Ends the process. Jobs that are still running end with Unavailable. Returns when it is reaped."""
        self._is_stopping = True
        await self._child.stop()

    def kill(self, reason: str) -> None:
        """Ends a process that is of no use any more. Its jobs hear of it as EngineDied naming `reason`."""
        self._kill_reason = reason
        self._child.kill()

    # --- requests ------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._ids)

    async def writable(self) -> None:
        """Waits while the pipe is full, so that prompts do not pile up in the daemon."""
        await self._child.writable()

    def submit(self, message: wire.Submit | wire.Embed, sink: Sink) -> None:
        """Sends a request; its news go to `sink`. Raises EngineDied or Unavailable when the engine is gone, and
        TooLarge for one that is more than an engine takes at once."""
        self._check_usable()
        if not self.n_outstanding:
            self.last_frame_s = time.monotonic()
        self._write(message)
        self._sinks[message.id] = sink

    def cancel(self, request_id: int) -> None:
        """Asks for the end of a request; its sink still gets a final delta. Unknown ids are ignored."""
        if request_id in self._sinks and self.error is None:
            self._child.write(wire.Cancel(request_id))

    async def count(
        self, segments: tuple[wire.Segment, ...], *, is_prompt: bool = True, wants_pieces: bool = False
    ) -> wire.Counted:
        """The tokens of a text. Raises EngineDied or Unavailable when the engine is gone, and TooLarge as `submit`."""
        await self._child.writable()
        asked = wire.Count(id=self.next_id(), segments=segments, is_prompt=is_prompt, wants_pieces=wants_pieces)
        return await self._answer(asked, self._counts)

    async def clear_cache(self, *, ram: bool, disk: bool) -> wire.Cleared:
        """Forgets kept prefixes in memory, on disk, or both. Raises EngineDied or Unavailable when the engine is gone.

        Done between two steps, so it waits for the step that runs.
        """
        return await self._answer(wire.ClearCache(id=self.next_id(), ram=ram, disk=disk), self._clearings)

    async def _answer(
        self, message: wire.Count | wire.ClearCache, answers: dict[int, asyncio.Future[Answer]]
    ) -> Answer:
        self._check_usable()
        self._write(message)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answers[message.id] = answer
        try:
            return await answer
        finally:
            answers.pop(message.id, None)

    def queue_position(self, request_id: int) -> int | None:
        """1 is next; None when it does not wait."""
        try:
            return self._queue.index(request_id) + 1
        except ValueError:
            return None

    def predicted_wait_s(self, request_id: int, now_s: float) -> float | None:
        """Seconds until its next token, by the engine's last prediction; None when it does not wait, or nothing is
        known."""
        position = self.queue_position(request_id)
        if position is None or self._waits_s is None:
            return None
        return max(0.0, self._waits_s[position - 1] - (now_s - self._queue_at_s))

    def longest_wait_s(self, now_s: float) -> float | None:
        """The longest of all waits, by the engine's last prediction; None when none waits, or nothing is known."""
        return max(0.0, max(self._waits_s) - (now_s - self._queue_at_s)) if self._waits_s else None

    def kv_runs(self) -> list[KvRunRow]:
        """The KV cells in use; those of a request that has ended since are kept for later by now."""
        return [
            KvRunRow(
                run.start, run.n_cells, sink.id if (sink := self._sinks.get(run.request_id)) else None, run.is_shared
            )
            for run in self._kv_map
        ]

    def long_steps(self) -> list[LongStepRow]:
        """The longest of each of the last ten minutes, the longest first."""
        return sorted(self._recent_long_steps().values(), key=lambda row: row.seconds, reverse=True)

    def _recent_long_steps(self) -> dict[int, LongStepRow]:
        since_s = time.time() - LONG_STEPS_S
        return {minute: row for minute, row in self._long_steps.items() if row.at_s >= since_s}

    def _write(self, message: wire.Submit | wire.Embed | wire.Count | wire.ClearCache) -> None:
        try:
            self._child.write(message)
        except framing.FrameTooLarge as error:
            raise TooLarge(f"the request is too large for an engine ({error}); send less at once") from None

    def _check_usable(self) -> None:
        if self.error is not None:
            raise self.error
        if self._is_stopping:
            raise Unavailable(f"model '{self.model}' is being unloaded; send the request again")

    # --- from the child ------------------------------------------------------------------------------------------

    def _on_message(self, message: wire.FromEngine) -> None:
        self.last_frame_s = time.monotonic()
        if isinstance(message, wire.Step):
            self._take_step(message)
        elif isinstance(message, wire.Counted):
            answer = self._counts.pop(message.id, None)
            if answer is None or answer.done():
                return
            if message.error is None:
                answer.set_result(message)
            else:
                answer.set_exception(by_code(message.error_code, message.error, retry_after_s=message.retry_after_s))
        elif isinstance(message, wire.Cleared):
            clearing = self._clearings.pop(message.id, None)
            if clearing is not None and not clearing.done():
                clearing.set_result(message)
        elif self._opened is not None and not self._opened.done():
            if isinstance(message, wire.Ready):
                # Both at once: the stall watch may look before whoever waits here goes on.
                self.ready, self._is_ready = message, True
                self._opened.set_result(message)
            else:
                self._opened.set_exception(by_code(message.code, message.message))

    def _take_step(self, step: wire.Step) -> None:
        self.stats = step.stats
        if step.queue is not None:
            self._queue, self._waits_s, self._queue_at_s = step.queue, step.waits_s, step.sent_at_s
        if step.kv_map is not None:
            self._kv_map = step.kv_map
        if step.long_step is not None:
            row = LongStepRow(time.time(), *msgspec.structs.astuple(step.long_step))
            self._long_steps = {**self._recent_long_steps(), int(step.sent_at_s // 60): row}
        if not self.has_answered and any(map(_is_answer, step.deltas)):
            self.has_answered = True
            self._on_answered(self)
        for started in step.started:
            sink = self._sinks.get(started.id)
            if sink is not None:
                sink.on_started(started)
                self.last_in_slot[started.slot] = sink.record
        for delta in step.deltas:
            sink = self._sinks.get(delta.id) if delta.finish is None else self._sinks.pop(delta.id, None)
            if sink is not None:
                sink.on_delta(delta, step.sent_at_s)
        self._on_step(self, step)

    def _on_line(self, line: str) -> None:
        self._lines.append(line)
        _log.info("[%s] %s", self.model, line)

    def _on_child_end(self, end: End) -> None:
        self.end = end
        self.error = error = self._end_as_error(end)
        is_own_end = self._kill_reason is None and not self._is_stopping
        if is_own_end and end.is_crash:
            self.crash = end.how
        self.was_killed = is_own_end and end.is_by_others
        if self.died:
            last = "".join(f"\n    {line}" for line in self._lines)
            _log.error("%s; its last lines were:%s", error.message, last or " (none)")
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(error)
        answers: list[asyncio.Future[Any]] = [*self._counts.values(), *self._clearings.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
        # Those that had begun come back first: while they are on trial nobody else is new.
        sinks = sorted(self._sinks.values(), key=lambda sink: not sink.record.has_begun)
        self._sinks.clear()
        blamed = [] if self.was_killed else _blamed(sinks)
        self.n_at_work = len(sinks) + len(self._counts)
        go_on = [sink.on_engine_gone(error, is_blamed=sink in blamed, is_alone=len(blamed) == 1) for sink in sinks]
        self.is_survived_by_all = not self._counts and all(go_on)
        self._on_end(self)

    def _end_as_error(self, end: End) -> LocalrunError:
        if self._is_stopping:
            return Unavailable(f"model '{self.model}' was unloaded before the request ended; send it again")
        how = end.how
        if self._kill_reason is not None and end.kind is not EndKind.BROKE_PROTOCOL:
            how = self._kill_reason
        if end.kind is EndKind.BAD_INSTRUCTION:
            return EngineDied(f"the engine of model '{self.model}' {how}: {kernels.OTHER_PROCESSOR.line}")
        if self._kill_reason is None and kernels.has_no_threads("\n".join(self._lines)):
            return EngineDied(f"the engine of model '{self.model}' {how}: {kernels.NO_THREADS.line}")
        if self._is_ready:
            return EngineDied(f"the engine of model '{self.model}' {how}; the next request starts a new one")
        if end.is_crash:
            return BadModelFile(
                f"llama.cpp crashed while loading model '{self.model}' (the engine {how}); the file may be damaged, "
                f"or of a kind that this version cannot run: the log has llama.cpp's last words",
                field="model",
            )
        is_kill = end.kind in (EndKind.KILLED, EndKind.KILLED_BY_OTHERS)
        hint = "; most likely the system ran out of memory" if is_kill and self._kill_reason is None else ""
        return EngineDied(f"the engine of model '{self.model}' {how} while loading{hint}")


def _blamed(sinks: list[Sink]) -> list[Sink]:
    """The requests that may have killed an engine: whichever was on trial, and others that had just begun then. Without
    a trial all that had begun, or else all."""
    if any(sink.record.is_on_trial for sink in sinks):
        return [sink for sink in sinks if sink.record.has_begun and not sink.record.has_shown]
    return [sink for sink in sinks if sink.record.has_begun] or sinks


def _is_answer(delta: wire.Delta) -> bool:
    """Whether something was computed for it: a token, a vector, or an end that the model chose at once."""
    return bool(delta.tokens or delta.vectors) or delta.finish in (wire.Finish.STOP, wire.Finish.LENGTH)
