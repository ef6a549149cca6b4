"""The conversation with one engine: requests out, the news of every step in.

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
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from localrun import framing, wire
from localrun.errors import BadModelFile, EngineDied, EngineFailed, LocalrunError, TooLarge, Unavailable, by_code
from localrun.hardware import kernels
from localrun.server.engines.child import End, EndKind, EngineChild, NewChild
from localrun.snapshot import KvRunRow

KEPT_LINES = 20
# A step on a device that takes longer is at something else: its driver compiles kernels when they are first used.
PREPARING_AFTER_S = 5.0

_log = logging.getLogger("localrun.engine")


class Progress(Protocol):
    """How far a request is. See `Generation`."""

    has_shown: bool
    node: str

    @property
    def has_begun(self) -> bool: ...
    @property
    def is_on_trial(self) -> bool: ...


class Sink(Protocol):
    """Where a request's news go: its job, which people know as `id`."""

    @property
    def id(self) -> str: ...
    @property
    def record(self) -> Progress: ...

    def on_started(self, started: wire.Started) -> None: ...
    def on_delta(self, delta: wire.Delta, sent_at_s: float) -> None: ...
    def on_engine_gone(self, error: LocalrunError, *, is_blamed: bool, is_alone: bool) -> bool: ...


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
            raise EngineFailed(f"the engine process could not be started: {error}") from error
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
        self._check_usable()
        request_id = self.next_id()
        self._write(wire.Count(id=request_id, segments=segments, is_prompt=is_prompt, wants_pieces=wants_pieces))
        answer: asyncio.Future[wire.Counted] = asyncio.get_running_loop().create_future()
        self._counts[request_id] = answer
        try:
            return await answer
        finally:
            self._counts.pop(request_id, None)

    async def clear_cache(self, *, ram: bool, disk: bool) -> wire.Cleared:
        """Forgets kept prefixes in memory, on disk, or both. Raises EngineDied or Unavailable when the engine is gone.

        Done between two steps, so it waits for the step that runs.
        """
        self._check_usable()
        request_id = self.next_id()
        answer: asyncio.Future[wire.Cleared] = asyncio.get_running_loop().create_future()
        self._clearings[request_id] = answer
        self._child.write(wire.ClearCache(id=request_id, ram=ram, disk=disk))
        try:
            return await answer
        finally:
            self._clearings.pop(request_id, None)

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
        """Of all that wait, by the engine's last prediction; None when none does, or nothing is known."""
        return max(0.0, max(self._waits_s) - (now_s - self._queue_at_s)) if self._waits_s else None

    def kv_runs(self) -> list[KvRunRow]:
        """The KV cells in use; those of a request that has ended since are kept for later by now."""
        return [
            KvRunRow(
                run.start, run.n_cells, sink.id if (sink := self._sinks.get(run.request_id)) else None, run.is_shared
            )
            for run in self._kv_map
        ]

    def _write(self, message: wire.Submit | wire.Embed | wire.Count) -> None:
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
        if self._is_ready:
            return EngineDied(f"the engine of model '{self.model}' {how}; the next request starts a new one")
        if end.is_crash:
            return BadModelFile(
                f"llama.cpp crashed while loading model '{self.model}' (the engine {how}); the file may be damaged, "
                f"or of a kind that this version cannot run: the log has llama.cpp's last words",
                field="model",
            )
        is_unexplained = end.is_kill and self._kill_reason is None
        hint = "; most likely the system ran out of memory" if is_unexplained else ""
        return EngineDied(f"the engine of model '{self.model}' {how} while loading{hint}")


def _blamed(sinks: list[Sink]) -> list[Sink]:
    """Those of which an engine may have died: whoever was on trial, and others that had just begun then. Without a
    trial all that had begun, or else all."""
    if any(sink.record.is_on_trial for sink in sinks):
        return [sink for sink in sinks if sink.record.has_begun and not sink.record.has_shown]
    return [sink for sink in sinks if sink.record.has_begun] or sinks


def _is_answer(delta: wire.Delta) -> bool:
    """Whether something was computed for it: a token, a vector, or an end that the model chose at once."""
    return bool(delta.tokens or delta.vectors) or delta.finish in (wire.Finish.STOP, wire.Finish.LENGTH)
