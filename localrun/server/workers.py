"""Worker processes as the daemon uses them, and the one that renders chat templates (`TemplateRenderer`): one request
after the other, killed when it overruns, replaced when it dies.

Owner: the daemon's event loop. Requests go to the worker one at a time, in the order they were asked, so the time that
one waits is never counted against its own limit, and one that is stuck costs the others the limit and a restart, not
their result. A worker that dies of something else than its time (a crash, the system's memory killer) is replaced and
the request tried once more. What the worker does about its own limits is in `worker_limits.py`.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import psutil

from localrun import framing
from localrun.errors import BadRequest, BadTemplate, TooLarge, Unavailable, by_code
from localrun.processes import HIDDEN, end_child
from localrun.server.http.exchange import apart
from localrun.wire import RenderReply, RenderRequest, Segment

START_TIMEOUT_S = 60.0
# A worker that gets no processor is waited for so many times as long as it may compute.
MAX_WAIT = 10
# What Python needs to start and to find this package; nothing else of the daemon's environment is the worker's to know.
_ENVIRONMENT = frozenset(
    {
        *("PATH", "HOME", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
        *("SYSTEMROOT", "USERPROFILE", "APPDATA"),
    }
)

Reply = TypeVar("Reply")


class OverranError(Exception):
    """The request took longer than it may; its worker was killed."""


class DiedError(Exception):
    """The request ended its worker, twice."""


class WorkerProcess(Generic[Reply]):
    """Owns the worker `python -m module arguments...`, which says that it is ready by an empty reply. `timeout_s`
    bounds the processor time of one request. `name` is for errors."""

    def __init__(
        self,
        module: str,
        decode: Callable[[bytes], Reply],
        *,
        name: str,
        timeout_s: float,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # -P: the daemon's working folder must not be a place to import from.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._decode = decode
        self._name = name
        self._timeout_s = timeout_s
        self._environment = environment or {}
        self._turn = asyncio.Lock()
        self._worker: Process | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._worker is None else self._worker.pid

    async def start(self) -> None:
        """Start the worker, so that the first request need not wait. Raises Unavailable when it does not come up."""
        async with self._turn:
            self._stopped = False
            if self._worker is None:
                self._worker = await self._spawn()

    async def stop(self) -> None:
        """End the worker. A request under way ends with Unavailable."""
        self._stopped = True
        await self._discard()
        async with self._turn:  # a request that was just starting a worker gives up at its next look at `_stopped`
            await self._discard()

    async def end(self) -> None:
        """End the worker when its requests are over. The next one starts another."""
        async with self._turn:
            await self._discard()

    async def ask(self, frame: bytes) -> Reply:
        """The worker's reply to a frame. Raises OverranError, DiedError, and Unavailable (no worker)."""
        await self._turn.acquire()
        # A task of its own: a client that goes away must not leave its reply in the pipe for the next one to read.
        exchange = asyncio.create_task(self._exchange(frame))
        exchange.add_done_callback(self._end_turn)
        return await asyncio.shield(exchange)

    def _end_turn(self, exchange: asyncio.Task[Reply]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            exchange.exception()  # nobody else looks at it when the client has gone

    async def _exchange(self, frame: bytes) -> Reply:
        """Send one request and read its reply, with one more try when the worker dies without having overrun."""
        for _ in range(2):
            if self._stopped:
                raise Unavailable("the daemon is shutting down")
            worker = self._worker = self._worker or await self._spawn()
            try:
                return await self._watched(worker, frame)
            except TimeoutError:
                await self._discard()
                raise OverranError from None
            except (asyncio.IncompleteReadError, ConnectionError, framing.FrameError):
                await self._discard()
        if self._stopped:
            raise Unavailable("the daemon is shutting down")
        raise DiedError

    async def _watched(self, worker: Process, frame: bytes) -> Reply:
        """Raises TimeoutError when the worker has computed for longer than it may. What counts is its processor time:
        on a busy machine it may get none for seconds. The first quarter goes unwatched, so that nearly all requests
        cost no look."""
        asking = asyncio.ensure_future(self._send(worker, frame))
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

    async def _send(self, worker: Process, frame: bytes) -> Reply:
        assert worker.stdin is not None
        if worker.stdin.is_closing():  # it died while nobody asked it; uvloop raises RuntimeError for a write
            raise ConnectionResetError
        worker.stdin.write(frame)
        await worker.stdin.drain()
        return await self._read_reply(worker)

    async def _read_reply(self, worker: Process) -> Reply:
        assert worker.stdout is not None
        prefix = await worker.stdout.readexactly(4)
        return self._decode(await worker.stdout.readexactly(framing.body_length(prefix)))

    async def _spawn(self) -> Process:
        """A worker that is ready; another one once if something ends the first while it starts, as the system does
        where memory is short. Raises Unavailable."""
        environment = {
            name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("PYTHON")
        }
        for _ in range(2):
            worker = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=environment | dict(self._environment), **HIDDEN
            )
            is_ready = False
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._read_reply(worker)
                is_ready = True
                return worker
            except TimeoutError:
                break
            except (asyncio.IncompleteReadError, ConnectionError, framing.FrameError):
                continue
            finally:  # also when nobody waits any more
                if not is_ready:
                    await end_child(worker)
        raise Unavailable(f"the {self._name} worker did not start; the daemon's log says why")

    async def _discard(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await end_child(worker)


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:  # it has ended, and its pipe says so
        return 0.0
    return float(times.user + times.system)


# The longest templates seen are about 20,000 characters.
MAX_TEMPLATE_CHARACTERS = 1_000_000


class TemplateOverrunError(BadTemplate):
    """A render took its worker with it: it would do so again, and every try costs the others their worker."""


def check_length(template: str) -> None:
    """Raises BadTemplate for a template that nobody should look at any closer: not the daemon, nor the worker."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise BadTemplate(
            f"the chat template has {len(template)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}; shorten it",
            field="template",
        )


class TemplateRenderer(WorkerProcess[RenderReply]):
    """The template worker. `timeout_s` and `output_bytes` bound one render.

    Does not: load Jinja into the daemon, or decide which template and which variables to use.
    """

    def __init__(self, *, timeout_s: float, output_bytes: int) -> None:
        super().__init__(
            "localrun.server.templates.worker", framing.decode_from_renderer, name="template", timeout_s=timeout_s
        )
        self._output_bytes = output_bytes

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
            frame = await apart(framing.encode, request)
        except UnicodeEncodeError:
            raise BadRequest("the messages contain half of a surrogate pair", field="messages") from None
        except framing.FrameTooLarge as error:
            raise TooLarge(f"the messages are too large for a chat template ({error})") from None
        except RecursionError:
            raise BadRequest("the messages nest too deeply", field="messages") from None
        try:
            reply = await self.ask(frame)
        except OverranError:
            raise TemplateOverrunError(
                f"the chat template ran longer than {self._timeout_s:g} s (setting template_timeout_s)"
            ) from None
        except DiedError:
            raise TemplateOverrunError("the chat template ended its worker process twice") from None
        if reply.error_code is not None:
            raise by_code(reply.error_code, reply.error_message)
        return reply.segments
