"""Rendering chat templates from the daemon: one worker process, restarted when it dies or overruns.

Owner: the daemon's event loop. Renders go to the worker one at a time, in the order they were asked for, so the time
that a render waits is never counted against its own limit, and a render that is stuck costs the others the limit and a
restart, not their result. A worker that dies of something else than its time (a crash, the system's memory killer)
is replaced and the render tried once more.

Does not: load Jinja into the daemon, or decide which template and which variables to use.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

import psutil

from localrun import errors, framing
from localrun.wire import RenderReply, RenderRequest, Segment

START_TIMEOUT_S = 60.0
# A worker that gets no processor is waited for so many times as long as it may compute.
MAX_WAIT = 10
# The longest templates seen are about 20,000 characters.
MAX_TEMPLATE_CHARACTERS = 1_000_000
# What Python needs to start and to find this package; nothing else of the daemon's environment is the worker's to know.
_ENVIRONMENT = frozenset(
    {
        *("PATH", "HOME", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
        *("SYSTEMROOT", "USERPROFILE", "APPDATA"),
    }
)


class TemplateOverrunError(errors.BadTemplate):
    """A render took its worker with it: it would do so again, and every try costs the others their worker."""


def check_length(template: str) -> None:
    """Raises BadTemplate for a template that nobody should look at any closer: not the daemon, nor the worker."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise errors.BadTemplate(
            f"the chat template has {len(template)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}; shorten it",
            field="template",
        )


class TemplateRenderer:
    """Owns the worker. `timeout_s` and `output_bytes` bound one render."""

    def __init__(self, *, timeout_s: float, output_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._output_bytes = output_bytes
        self._turn = asyncio.Lock()
        self._worker: Process | None = None
        self._stopped = False

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._worker is None else self._worker.pid

    async def start(self) -> None:
        """Start the worker, so that the first render need not wait. Raises Unavailable when it does not come up."""
        async with self._turn:
            self._stopped = False
            if self._worker is None:
                self._worker = await self._spawn()

    async def stop(self) -> None:
        """End the worker. A render under way ends with Unavailable."""
        self._stopped = True
        await self._discard()
        async with self._turn:  # a render that was just starting a worker gives up at its next look at `_stopped`
            await self._discard()

    async def render(
        self, template: str, variables: dict[str, Any], control_tokens: Sequence[str]
    ) -> tuple[Segment, ...]:
        """The prompt of a conversation.

        Text of a control token inside the variables (except those named `*_token`) comes back in untrusted segments.
        Raises BadTemplate (broken, too long, against the sandbox, over the output limit), TemplateOverrunError (a
        BadTemplate: over the time limit, or it ended its worker twice), BadRequest (the template's own
        `raise_exception`; variables that are no valid data) and Unavailable (no worker).
        """
        check_length(template)
        request = RenderRequest(
            template=template,
            variables=variables,
            control_tokens=tuple(control_tokens),
            output_bytes=self._output_bytes,
            cpu_s=math.ceil(self._timeout_s) + 1,
        )
        try:
            frame = framing.encode(request)
        except UnicodeEncodeError:
            raise errors.BadRequest("the messages contain half of a surrogate pair", field="messages") from None
        except RecursionError:
            raise errors.BadRequest("the messages nest too deeply", field="messages") from None
        await self._turn.acquire()
        # A task of its own: a client that goes away must not leave its reply in the pipe for the next render to read.
        exchange = asyncio.create_task(self._exchange(frame))
        exchange.add_done_callback(self._end_turn)
        reply = await asyncio.shield(exchange)
        if reply.error_code is not None:
            raise errors.by_code(reply.error_code, reply.error_message)
        return reply.segments

    def _end_turn(self, exchange: asyncio.Task[RenderReply]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            exchange.exception()  # nobody else looks at it when the client has gone

    async def _exchange(self, frame: bytes) -> RenderReply:
        """Send one request and read its reply, with one more try when the worker dies without having overrun."""
        for _ in range(2):
            if self._stopped:
                raise errors.Unavailable("the daemon is shutting down")
            worker = self._worker = self._worker or await self._spawn()
            try:
                return await self._ask(worker, frame)
            except TimeoutError:
                await self._discard()
                raise TemplateOverrunError(
                    f"the chat template ran longer than {self._timeout_s:g} s (setting template_timeout_s)"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError, framing.FrameError):
                await self._discard()
        if self._stopped:
            raise errors.Unavailable("the daemon is shutting down")
        raise TemplateOverrunError("the chat template ended its worker process twice")

    async def _ask(self, worker: Process, frame: bytes) -> RenderReply:
        """Raises TimeoutError when the worker has computed for longer than a render may. What counts is its processor
        time: on a busy machine it may get none for seconds. The first quarter goes unwatched, so that nearly all
        renders cost no look."""
        asking = asyncio.ensure_future(_ask(worker, frame))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MAX_WAIT * self._timeout_s
        left_s, began_cpu_s = self._timeout_s / 4, None
        try:
            while left_s > 0 and loop.time() < until_s:
                done, _ = await asyncio.wait({asking}, timeout=left_s)
                if done:
                    return asking.result()
                cpu_s = _cpu_seconds(worker.pid)
                began_cpu_s = cpu_s if began_cpu_s is None else began_cpu_s
                left_s = self._timeout_s * 3 / 4 - (cpu_s - began_cpu_s)
            raise TimeoutError
        finally:
            asking.cancel()

    async def _spawn(self) -> Process:
        # -P: the daemon's working folder must not be a place to import from.
        command = [sys.executable, "-P", "-m", "localrun.server.templates.worker"]
        environment = {
            name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("PYTHON")
        }
        worker = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _read_reply(worker)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, framing.FrameError):
            await _end(worker)
            raise errors.Unavailable("the template worker did not start; the daemon's log says why") from None
        return worker

    async def _discard(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await _end(worker)


async def _ask(worker: Process, frame: bytes) -> RenderReply:
    assert worker.stdin is not None
    worker.stdin.write(frame)
    await worker.stdin.drain()
    return await _read_reply(worker)


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:  # it has ended, and its pipe says so
        return 0.0
    return float(times.user + times.system)


async def _read_reply(worker: Process) -> RenderReply:
    assert worker.stdout is not None
    prefix = await worker.stdout.readexactly(4)
    return framing.decode_from_renderer(await worker.stdout.readexactly(framing.body_length(prefix)))


async def _end(worker: Process) -> None:
    """Kill the worker and wait until the system has let go of it and its pipes."""
    assert worker.stdin is not None
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    await worker.wait()
    worker.stdin.close()
    with contextlib.suppress(ConnectionError):
        await worker.stdin.wait_closed()
