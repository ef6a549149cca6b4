"""One engine that computes for any number of doors: the other end of `wire_child.py`.

Runs in an event loop of its own process. The engine is lent by a supervisor that knows one model, so that it is placed,
watched and started again as on a machine by itself. Requests of all doors go to it as they come, under numbers of its
own link, and after each of its steps every door with news gets one `Step`, however many streams it has.

When the engine dies, every door is told how, and its connection ends: whoever had requests there resumes them by its
own rules, here or elsewhere. A door that leaves, or says nothing, has its requests cancelled.

Pictures and sound come before the requests that have them, and lie in a folder of this process, as long as the door
wants them kept for its connection and a request needs them. Adapters are named by their digests.

Invariants: no door sees a number, or news, of another's request; nothing that a door sends names a file of this
machine, or of another door.
Does not: check API keys or count usage (doors do), or choose who computes what.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from localrun import __version__, framing, wire
from localrun.cluster import frames
from localrun.cluster.affinity import Digest
from localrun.cluster.frames import RUNNING_TOKENS, Work, prompt_of
from localrun.errors import BadRequest, DiskFull, EngineDied, LocalrunError, Unauthorized, Unavailable
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import EngineLease

HELLO_TIMEOUT_S = 5.0
MAX_DOORS = 64
# A load that failed is tried again after so long, unless the supervisor says later.
RETRY_S = 1.0
# What a `Hello` can be at most; more is for those who were let in.
MAX_HELLO_BYTES = 4096
# A door that does not read is sent away with so much unsent.
MAX_UNSENT_BYTES = 64 * 1024 * 1024
# Digests of prompts that are remembered, which doors ask for every second.
MAX_RECENT = 512
# What a door's pictures and recordings take at most: doors have this limit for all of their requests.
MAX_MEDIA_BYTES = 4 * 1024 * 1024 * 1024

_Asked = TypeVar("_Asked", wire.Submit, wire.Embed, wire.Submit | wire.Embed, wire.Count)

_log = logging.getLogger(__name__)


class Replica:
    """See the module. `borrow` loads the model if need be. `token` is the cluster's for frames, `app` the fingerprint
    of what is computed here. Whoever made the supervisor hands its `on_step` and `on_ended` on. `adapters` are the
    files of those that requests may have in effect, by digest."""

    def __init__(
        self,
        borrow: Callable[[], Awaitable[EngineLease]],
        *,
        token: bytes,
        app: str,
        adapters: Mapping[bytes, str] = MappingProxyType({}),
        media_root: Path | None = None,
    ) -> None:
        self._borrow = borrow
        self.token, self.app, self.adapters = token, app, adapters
        self.media_folder = tempfile.TemporaryDirectory(prefix="localrun-media-", dir=media_root)
        self._loan: EngineLease | None = None
        self._doors: set[_Door] = set()
        self._server: asyncio.Server | None = None
        self._loading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._recent: dict[Digest, None] = {}  # oldest first
        self.why_not = "it is loading its model"

    async def start(self, host: str, port: int = 0, tls: ssl.SSLContext | None = None) -> int:
        """Loads the model and listens. Returns the port. Raises what loading raises, and OSError."""
        self._loan = await self._borrow()
        server = await asyncio.get_running_loop().create_server(lambda: _Door(self), host, port, ssl=tls)
        self._server = server
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Ends all connections, and gives the engine back."""
        if self._server is not None:
            self._server.close()
        for task in (self._loading, *self._tasks):
            if task is not None:
                task.cancel()
        for door in list(self._doors):
            door.leave()
        if self._loan is not None:
            self._loan.release()
            self._loan = None
        self.media_folder.cleanup()

    @property
    def n_requests(self) -> int:
        """Those of all doors, running and waiting."""
        return sum(door.n_requests for door in self._doors)

    @property
    def work_tokens(self) -> float:
        """What all doors' requests have still to compute, and what those cost that are answered."""
        return sum(door.work_tokens for door in self._doors)

    @property
    def recent(self) -> bytes:
        """Digests of the prompts that this engine computed last."""
        return b"".join(self._recent)

    @property
    def link(self) -> EngineLink:
        """Raises Unavailable while there is none."""
        if self._loan is None or self._loan.link.error is not None:
            raise Unavailable(f"this replica has no engine at the moment: {self.why_not}")
        return self._loan.link

    def on_step(self, link: EngineLink, step: wire.Step) -> None:
        """The engine's step is over, and each request has its news."""
        for door in self._doors:
            door.flush(step)

    def on_ended(self, link: EngineLink) -> None:
        """The engine is gone."""
        if self._loan is None or self._loan.link is not link:
            return
        self.why_not = link.error.message if link.error is not None else "it was unloaded"
        self._loan.release()
        self._loan = None
        self._recent.clear()
        for door in list(self._doors):
            door.end(link)
        if self._server is not None and self._server.is_serving():
            self._loading = asyncio.create_task(self._load_again())

    async def _load_again(self) -> None:
        while self._loan is None:
            try:
                self._loan = await self._borrow()
            except LocalrunError as error:
                self.why_not = error.message
                _log.warning("the replica has no engine: %s", error.message)
                await asyncio.sleep(RETRY_S)

    # --- for doors -----------------------------------------------------------------------------------------------

    def take(self, door: _Door, hello: frames.Hello) -> wire.Ready:
        """Lets a door in. Raises LocalrunError."""
        if not hmac.compare_digest(hello.token, self.token):
            raise Unauthorized("this is not the cluster's token for engines")
        if hello.protocol != frames.PROTOCOL:
            raise BadRequest(
                f"the door (localrun {hello.version}) speaks protocol {hello.protocol}, this replica (localrun "
                f"{__version__}) {frames.PROTOCOL}: update the older one"
            )
        if hello.app != self.app:
            raise BadRequest("this replica computes something else: the model's description has changed since")
        if len(self._doors) >= MAX_DOORS:
            raise Unavailable(f"{MAX_DOORS} doors are connected already, which is the most")
        ready = self.link.ready
        self._doors.add(door)
        return ready

    def note(self, prompt: tuple[Digest, ...]) -> None:
        """It is computed here."""
        for digest in prompt:
            self._recent.pop(digest, None)
            self._recent[digest] = None
        for oldest in list(self._recent)[: max(0, len(self._recent) - MAX_RECENT)]:
            del self._recent[oldest]

    def left(self, door: _Door) -> None:
        self._doors.discard(door)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Door(asyncio.Protocol):
    """The connection of one door."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._transport: asyncio.Transport | None = None
        self._frames = framing.FrameBuffer()
        self._is_in = False
        self._n_before = 0  # bytes before it was let in
        self._heard_at_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        # By the door's numbers; and the door's numbers by those of the engine's link.
        self._requests: dict[int, _Request] = {}
        self._numbers: dict[int, int] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._deltas: list[wire.Delta] = []
        self._started: list[wire.Started] = []
        self._media: dict[bytes, _Media] = {}

    @property
    def n_requests(self) -> int:
        return len(self._requests)

    @property
    def work_tokens(self) -> float:
        return sum(request.work.left_tokens + RUNNING_TOKENS for request in self._requests.values())

    # --- called by the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.leave)

    def data_received(self, data: bytes) -> None:
        now_s = self._heard_at_s = time.monotonic()
        if not self._is_in:
            self._n_before += len(data)
            if self._n_before > MAX_HELLO_BYTES:
                self.leave()
                return
        try:
            for body in self._frames.feed(data):
                self._take(frames.decode_to_replica(body, now_s))
        except framing.FrameError as error:
            _log.warning("a door is sent away: %s", error)
            self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._replica.left(self)
        for task in self._asking:
            task.cancel()
        for request in list(self._requests.values()):
            request.link.cancel(request.number)
        for one in self._media.values():
            one.forget()

    # --- from the door -------------------------------------------------------------------------------------------

    def _take(self, message: frames.ToReplica) -> None:
        if not self._is_in:
            self._greet(message)
        elif isinstance(message, wire.Submit | wire.Embed):
            self._submit(message)
        elif isinstance(message, frames.Bytes):
            self._keep(message)
        elif isinstance(message, frames.Forget):
            if (one := self._media.pop(message.digest, None)) is not None:
                one.forget()
        elif isinstance(message, wire.Cancel):
            request = self._requests.get(message.id)
            if request is not None:
                request.link.cancel(request.number)
        elif isinstance(message, wire.Count):
            self._ask(self._count(message))
        elif isinstance(message, wire.ClearCache):
            self._ask(self._clear(message))

    def _greet(self, message: frames.ToReplica) -> None:
        try:
            if not isinstance(message, frames.Hello):
                raise BadRequest("the first message is not a Hello")
            ready = self._replica.take(self, message)
        except LocalrunError as error:
            self._send(frames.Refused(code=error.code, message=error.message))
            self.leave()
            return
        self._is_in = True
        self._send(frames.Welcome(ready=ready))
        self._beat()

    def _submit(self, message: wire.Submit | wire.Embed) -> None:
        if message.id in self._requests:
            _log.warning("a door is sent away: it used the number %d twice", message.id)
            self.leave()
            return
        try:
            link = self._replica.link
            request = _Request(self, link, message)
            self._requests[message.id] = request
            self._numbers[request.number] = message.id
            message = self._located(message, request.media)
            link.submit(msgspec.structs.replace(message, id=request.number), request)
            self._replica.note(prompt_of(message))
        except (EngineDied, Unavailable):
            return  # the connection ends with the engine
        except LocalrunError as error:
            self.forget(message.id)
            self._deltas.append(
                wire.Delta(
                    message.id, wire.Phase.DONE, 0, 0, finish=wire.Finish.ERROR, error_code=error.code,
                    error_message=error.message,
                )
            )  # fmt: skip
            self._flush_refusals()

    def _keep(self, piece: frames.Bytes) -> None:
        one = self._media.get(piece.digest)
        if one is None:
            one = self._media[piece.digest] = _Media(self._replica.media_folder.name)
        if one.write(piece) and sum(each.n_bytes for each in self._media.values()) > MAX_MEDIA_BYTES:
            _log.warning("a door is sent away: its pictures and recordings take more than %d bytes", MAX_MEDIA_BYTES)
            self.leave()

    def _located(self, message: _Asked, used: list[_Media]) -> _Asked:
        """The message with this machine's files, of which the media are `used` from now on. Raises BadRequest for what
        is not here, and DiskFull."""

        def here(media: wire.Media) -> wire.Media:
            one = self._media.get(media.digest)
            if one is None or not one.is_whole:
                raise BadRequest("the door has not sent a picture or a recording of its request", field="messages")
            used.append(one.taken())
            return msgspec.structs.replace(media, path=str(one.path))

        if isinstance(message, wire.Submit):
            if message.draft_model_path:
                raise BadRequest("draft models of single requests do not work in a cluster", field="draft_model")
            adapters = self._replica.adapters
            if any(each.digest not in adapters for each in message.adapters or ()):
                raise BadRequest("this replica does not have an adapter of the request", field="model")
            if message.adapters:
                own = [msgspec.structs.replace(each, path=adapters[each.digest]) for each in message.adapters]
                message = msgspec.structs.replace(message, adapters=tuple(own))
        return frames.with_media(message, here)

    def _ask(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._replica.spawn(work)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _count(self, message: wire.Count) -> None:
        used: list[_Media] = []
        try:
            message = self._located(message, used)
            link = self._replica.link
            counted = await link.count(message.segments, is_prompt=message.is_prompt, wants_pieces=message.wants_pieces)
        except EngineDied:
            return
        except LocalrunError as error:
            counted = wire.Counted(
                id=0, error=error.message, error_code=error.code, retry_after_s=getattr(error, "retry_after_s", None)
            )
        finally:
            for one in used:
                one.give_back()
        self._send(msgspec.structs.replace(counted, id=message.id))

    async def _clear(self, message: wire.ClearCache) -> None:
        try:
            cleared = await self._replica.link.clear_cache(ram=message.ram, disk=message.disk)
        except LocalrunError:
            return
        self._send(msgspec.structs.replace(cleared, id=message.id))

    # --- to the door ---------------------------------------------------------------------------------------------

    def started(self, started: wire.Started) -> None:
        self._started.append(started)

    def news(self, delta: wire.Delta) -> None:
        self._deltas.append(delta)

    def forget(self, door_id: int) -> None:
        request = self._requests.pop(door_id, None)
        if request is not None:
            self._numbers.pop(request.number, None)
            request.give_back()

    def flush(self, step: wire.Step) -> None:
        """One step's news. What is about others stays here, but how many of them wait before whom."""
        if not (self._deltas or self._started or self._requests):
            return
        own = self._numbers
        self._send_step(
            msgspec.structs.replace(
                step,
                deltas=self._deltas,
                started=self._started,
                queue=None if step.queue is None else [own.get(number, 0) for number in step.queue],
                kv_map=None if step.kv_map is None else [_seen_by(own, run) for run in step.kv_map],
            )
        )

    def end(self, link: EngineLink) -> None:
        """The engine is gone. What it said before has been sent."""
        for door_id in list(self._requests):
            self.forget(door_id)
        if link.end is not None:
            self._send(frames.Ended(end=link.end))
        self.leave()

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _flush_refusals(self) -> None:
        stats = self._replica.link.stats
        if stats is None:  # no step yet
            stats = wire.StepStats(0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._send_step(wire.Step(sent_at_s=time.monotonic(), deltas=self._deltas, stats=stats, started=self._started))

    def _send_step(self, step: wire.Step) -> None:
        self._deltas, self._started = [], []
        self._send(frames.aged(step, time.monotonic()))

    def _send(self, message: object) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            _log.warning("a door does not read: its requests are cancelled")
            self._transport.abort()
            return
        self._transport.write(framing.encode(message))

    def _beat(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if time.monotonic() - self._heard_at_s > frames.SILENCE_S:
            _log.warning("a door has said nothing for %.0f s: its requests are cancelled", frames.SILENCE_S)
            assert self._transport is not None
            self._transport.abort()
            return
        self._send(frames.Beat())
        self._timer = asyncio.get_running_loop().call_later(frames.BEAT_S, self._beat)


class _Request:
    """A door's request on the engine, under the link's own number: a sink. How far it is, and who is to blame for a
    death, the door knows."""

    has_begun = has_shown = is_on_trial = False
    node = ""

    def __init__(self, door: _Door, link: EngineLink, message: wire.Submit | wire.Embed) -> None:
        self.id = f"door:{message.id}"
        self.link, self.number = link, link.next_id()
        self._door, self._door_id = door, message.id
        self.work = Work(message)
        self.media: list[_Media] = []

    def give_back(self) -> None:
        for one in self.media:
            one.give_back()

    @property
    def record(self) -> _Request:
        return self

    def on_started(self, started: wire.Started) -> None:
        self.work.on_started(started)
        self._door.started(msgspec.structs.replace(started, id=self._door_id))

    def on_delta(self, delta: wire.Delta, sent_at_s: float) -> None:
        self.work.on_delta(delta)
        self._door.news(msgspec.structs.replace(delta, id=self._door_id))
        if delta.finish is not None:
            self._door.forget(self._door_id)

    def on_engine_gone(self, error: LocalrunError, *, is_blamed: bool, is_alone: bool) -> bool:
        return True  # the door decides


class _Media:
    """A picture or a recording: the file is gone as soon as the door does not want it kept, and no request has it."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / secrets.token_hex(8)
        self.n_bytes = self._n_users = 0
        self.is_whole = self._is_forgotten = False
        self._problem: OSError | None = None
        self._file: BinaryIO | None = None

    def write(self, piece: frames.Bytes) -> bool:
        """Whether it goes on. What cannot be written is said to the requests that have it."""
        try:
            if self._file is None:
                self._file = self.path.open("xb")
            self._file.write(piece.data)
            self.n_bytes += len(piece.data)
            if piece.is_last:
                self._file.close()
        except OSError as error:
            self._problem = error
        self.is_whole = piece.is_last
        return self._problem is None

    def taken(self) -> _Media:
        """Raises DiskFull."""
        if self._problem is not None:
            raise DiskFull(f"a picture or a recording cannot be kept for an engine: {self._problem.strerror}")
        self._n_users += 1
        return self

    def give_back(self) -> None:
        self._n_users -= 1
        self._end()

    def forget(self) -> None:
        self._is_forgotten = True
        self._end()

    def _end(self) -> None:
        if self._is_forgotten and self._n_users <= 0:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _seen_by(own: dict[int, int], run: wire.KvRun) -> wire.KvRun:
    """Cells as a door sees them: whose they are, if they are its own; 0 is of nobody."""
    return msgspec.structs.replace(run, request_id=own.get(run.request_id, 0))
