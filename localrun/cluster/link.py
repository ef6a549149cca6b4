"""A door's conversation with all replicas of one app: to its jobs, one engine that does not die.

`submit` returns at once, as that of an engine does; where the request goes is chosen at once, too, by what this door
knows, and then by whoever knows more (`Choose`), if that answers in time. A link to that replica is opened if there is
none. Until a replica has it, a request that is cancelled ends here, and a failure is told as the death of an engine
that nobody is to blame for: the job resumes by its own rules, and the next choice leaves out whoever has just failed.

Turns (see `EngineLink`) are for each replica: as many jobs that lost their engine try the next one at a time as there
are replicas, and each such request goes to where the fewest streams run.

Runs in the door's event loop. Does not: know the replicas by itself (`Roster` is told), or fetch models.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from localrun import wire
from localrun.cluster import frames
from localrun.cluster.affinity import DIGEST_BYTES, Affinity, Cost, Digest, pick
from localrun.cluster.frames import RUNNING_TOKENS, Work, prompt_of
from localrun.cluster.wire_child import Address, WireChild
from localrun.errors import Cancelled, EngineDied, EngineFailed, LocalrunError, Unavailable
from localrun.server.engines.link import EngineLink, RequestRecord, Sink

OPEN_TIMEOUT_S = 10.0
# So long nothing goes to a replica whose connection broke, unless all of them are like that.
AVOIDED_S = 30.0
LOOK_AGAIN_S = 0.2
# What replicas said of themselves counts for so long.
TOLD_FOR_S = 5.0

# Who else may choose: by a prompt's first block, and what it costs at each replica. "" is no answer.
Choose = Callable[[Digest, Mapping[str, Cost]], Awaitable[str]]

_log = logging.getLogger(__name__)


class Told(NamedTuple):
    """Of a replica: the work that it has for all doors, and digests of what it computed lately, one after the other."""

    work_tokens: float
    recent: bytes = b""


class Turns:
    """Of jobs that lost their engine: a lock with as many places as there are replicas."""

    def __init__(self, n_places: Callable[[], int]) -> None:
        self._n_places = n_places
        self._n_taken = 0
        self._freed = asyncio.Condition()

    def locked(self) -> bool:
        return self._n_taken >= max(1, self._n_places())

    async def __aenter__(self) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: not self.locked())
            self._n_taken += 1

    async def __aexit__(self, *_of_error: object) -> None:
        async with self._freed:
            self._n_taken -= 1
            self._freed.notify()


class ClusterLink:
    """See the module. `ready` is that of the replicas, which are opened alike. `hello` says which app, and with which
    token; without `tls` everything goes in the clear. `on_step` sees the steps of all replicas. `choose` may correct
    where a request goes; `wake` is told, again and again, that somebody waits and there is no replica."""

    error: LocalrunError | None = None  # of the app as a whole; there is always a next replica to wait for

    def __init__(
        self,
        *,
        model: str,
        hello: frames.Hello,
        tls: ssl.SSLContext | None = None,
        on_step: Callable[[EngineLink, wire.Step], None],
        choose: Choose | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self._ask, self._wake = choose, wake
        self.was_killed = False  # the replica that died last
        self.turn = Turns(lambda: len(self._addresses))
        self._hello, self._tls, self._on_step = hello, tls, on_step
        self._ids = itertools.count(1)
        self._addresses: dict[str, Address] = {}
        self._links: dict[str, EngineLink] = {}
        self._children: dict[str, WireChild] = {}
        self._opening: dict[str, asyncio.Task[EngineLink]] = {}
        self._avoided_until_s: dict[str, float] = {}
        self._others_tokens: dict[str, float] = {}  # what other doors have there
        self._told_at_s = 0.0
        self._affinity = Affinity()
        self._placed: dict[int, Placed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: wire.Ready | None = None

    # --- the replicas --------------------------------------------------------------------------------------------

    def replicas(self, addresses: Mapping[str, Address], told: Mapping[str, Told] | None = None) -> None:
        """Those that there are from now on, and what they say of themselves. What runs on one that is
        gone from this list goes on there; it ends when the connection does."""
        for replica in set(self._addresses) - set(addresses):
            self._affinity.forget(replica)
        for replica in set(self._links) - set(addresses):
            if replica in self._links and not self._links[replica].n_requests:
                self._spawn(self._links[replica].stop())
        self._addresses = dict(addresses)
        own = self._own_tokens()
        told = told or {}
        self._others_tokens = {name: max(0.0, one.work_tokens - own[name]) for name, one in told.items()}
        for name, one in told.items():
            starts = range(0, len(one.recent), DIGEST_BYTES)
            self._affinity.hear(name, (one.recent[start : start + DIGEST_BYTES] for start in starts))
        self._told_at_s = time.monotonic()

    @property
    def ready(self) -> wire.Ready:
        assert self._ready is not None, "`open` comes first"
        return self._ready

    async def open(self) -> None:
        """Connects with one replica, to know what they have. Raises Unavailable when none answers, and what a replica
        refuses a door with."""
        last: LocalrunError | None = None
        for replica in self._usable():
            try:
                self._ready = (await self._link_to(replica)).ready
            except LocalrunError as error:
                last = error
            else:
                return
        raise last or Unavailable(f"no replica of '{self.model}' is running")

    @property
    def is_reachable(self) -> bool:
        """Whether a replica takes requests. One that is to end does not, although its link is open."""
        return any(self._links[name].error is None for name in self._addresses if name in self._links)

    async def reachable(self, limit_s: float) -> None:
        """Waits until a replica takes requests. Raises Unavailable after `limit_s`, or what it was refused with."""
        until_s = time.monotonic() + limit_s
        while not self.is_reachable:
            if not self._addresses:
                self._wake()
            try:
                await self.open()
            except Unavailable as error:
                if time.monotonic() > until_s:
                    raise Unavailable(
                        f"no replica of '{self.model}' came within {limit_s:g} seconds: {error.message}; `localrun "
                        f"cluster status` shows what is missing"
                    ) from None
            except EngineFailed as error:  # nobody listens there
                if time.monotonic() > until_s:
                    raise Unavailable(f"no replica of '{self.model}' can be reached: {error.message}") from None
            else:
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def stop(self) -> None:
        for task in (*self._tasks, *self._opening.values()):
            task.cancel()
        await asyncio.gather(*(link.stop() for link in self._links.values()))

    @property
    def pid(self) -> int | None:
        return None

    @property
    def n_requests(self) -> int:
        return len(self._placed)

    @property
    def n_slots(self) -> int:
        """Of the replicas that there is a link to."""
        return sum(link.ready.n_slots for link in self._links.values() if link.error is None)

    def links(self) -> dict[str, EngineLink]:
        """Those that are open, by replica."""
        return dict(self._links)

    # --- for jobs ------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._ids)

    async def writable(self) -> None:
        """The wait for a slow replica comes after the choice."""

    def submit(self, message: wire.Submit | wire.Embed, sink: Sink) -> None:
        """See `EngineLink.submit`. What a replica refuses comes as the request's end."""
        placed = Placed(sink, message, lambda: self._placed.pop(message.id, None))
        self._placed[message.id] = placed
        placed.task = self._spawn(self._place(message, placed))

    def cancel(self, request_id: int) -> None:
        placed = self._placed.get(request_id)
        if placed is None:
            return
        if placed.link is not None:
            placed.link.cancel(request_id)
        elif placed.task is not None:
            placed.task.cancel()

    async def count(
        self, segments: tuple[wire.Segment, ...], *, is_prompt: bool = True, wants_pieces: bool = False
    ) -> wire.Counted:
        replica = next(iter(self._usable()), "")
        try:
            link = await self._link_to(replica)
        except (EngineFailed, Unavailable) as error:  # whoever asks waits for the next one, as with a request
            self.was_killed = True
            raise EngineDied(f"no replica of '{self.model}' counted the tokens: {error.message}") from None
        await self._bring(replica, wire.Count(id=0, segments=segments))
        return await link.count(segments, is_prompt=is_prompt, wants_pieces=wants_pieces)

    def queue_position(self, request_id: int) -> int | None:
        placed = self._placed.get(request_id)
        return None if placed is None or placed.link is None else placed.link.queue_position(request_id)

    def predicted_wait_s(self, request_id: int, now_s: float) -> float | None:
        placed = self._placed.get(request_id)
        return None if placed is None or placed.link is None else placed.link.predicted_wait_s(request_id, now_s)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _place(self, message: wire.Submit | wire.Embed, placed: Placed) -> None:
        try:
            replica = await self._chosen(message, placed)
            placed.record.node = self._addresses[replica].node
            link = await self._link_to(replica)
            await link.writable()
            await self._bring(replica, message)
            placed.link = link
            link.submit(message, placed)
        except asyncio.CancelledError:
            self._end(message.id, placed, Cancelled("the request was cancelled"), wire.Finish.CANCELLED)
        except LocalrunError as error:
            if isinstance(error, EngineDied | Unavailable) or placed.link is None:
                died = EngineDied(f"no replica of '{self.model}' took the request: {error.message}")
                placed.on_engine_gone(died, is_blamed=False, is_alone=False)
            else:
                self._end(message.id, placed, error, wire.Finish.ERROR)

    async def _bring(self, replica: str, message: wire.Submit | wire.Embed | wire.Count) -> None:
        """What a message says of pictures and sound is right there then. Raises Unavailable."""
        media = frames.media_of(message)
        try:
            if media:
                await self._children[replica].bring(media)
        except OSError as error:
            raise Unavailable(f"a picture or a recording of the request cannot be read: {error}") from None

    async def _chosen(self, message: wire.Submit | wire.Embed, placed: Placed) -> str:
        waiting = self._waiting_tokens()
        if not waiting:
            raise Unavailable(f"no replica of '{self.model}' is running")
        if message.resume is not None:  # it may be deadly: where it harms the fewest
            placed.replica = min(waiting, key=lambda replica: (self._n_running(replica), waiting[replica]))
            return placed.replica
        # Whoever comes while somebody else is asked sees this one there.
        costs = self._affinity.costs(placed.prompt, waiting)
        placed.replica = pick(placed.prompt[0], costs)
        if self._ask is not None:
            better = await self._ask(placed.prompt[0], costs)
            placed.replica = better if better in self._usable() else placed.replica
        self._affinity.note(placed.prompt, placed.replica)
        return placed.replica

    def _usable(self) -> list[str]:
        now_s = time.monotonic()
        good = [name for name in self._addresses if self._avoided_until_s.get(name, 0.0) <= now_s]
        return good or [name for name in self._addresses if name in self._links] or list(self._addresses)

    def _waiting_tokens(self) -> dict[str, float]:
        """What each usable replica has to compute before a new prompt, as far as this door knows."""
        own = self._own_tokens()
        is_fresh = time.monotonic() - self._told_at_s < TOLD_FOR_S
        others = self._others_tokens if is_fresh else {}
        return {name: own[name] + others.get(name, 0.0) for name in self._usable()}

    def _own_tokens(self) -> Counter[str]:
        """This door's work at each replica."""
        tokens: Counter[str] = Counter()
        for placed in self._placed.values():
            tokens[placed.replica] += placed.work.left_tokens + RUNNING_TOKENS
        return tokens

    def _n_running(self, replica: str) -> int:
        """This door's requests there, or all doors' at the last step of one of them."""
        n_own = sum(placed.replica == replica for placed in self._placed.values())
        stats = self._links[replica].stats if replica in self._links and n_own else None
        return max(n_own, 0 if stats is None else stats.n_running)

    async def _link_to(self, replica: str) -> EngineLink:
        """The open link, or a new one. Raises LocalrunError."""
        link = self._links.get(replica)
        if link is not None and link.error is None:
            return link
        if replica not in self._addresses:
            raise Unavailable(f"no replica of '{self.model}' is running")
        opening = self._opening.get(replica)
        if opening is None:
            opening = self._opening[replica] = asyncio.create_task(self._open(replica, self._addresses[replica]))
            opening.add_done_callback(lambda done: self._opened(replica, done))
        return await asyncio.shield(opening)

    async def _open(self, replica: str, address: Address) -> EngineLink:
        def new_child(**told: Any) -> WireChild:
            self._children[replica] = WireChild(address, self._hello, self._tls, **told)
            return self._children[replica]

        link = EngineLink(
            model=self.model, command=(), on_step=self._on_step, on_end=lambda ended: self._lost(replica, ended),
            new_child=new_child, ids=self._ids,
        )  # fmt: skip
        ready = await link.open(_NOTHING_TO_OPEN, OPEN_TIMEOUT_S)
        if self._ready is not None and not _is_alike(ready, self._ready):
            await link.stop()
            raise Unavailable(f"the replica on {address.node} was opened otherwise than the others")
        return link

    def _opened(self, replica: str, opening: asyncio.Task[EngineLink]) -> None:
        self._opening.pop(replica, None)
        if opening.cancelled():
            return
        if opening.exception() is None:
            self._links[replica] = opening.result()
            self._avoided_until_s.pop(replica, None)
        else:
            self._avoid(replica)

    def _lost(self, replica: str, link: EngineLink) -> None:
        self.was_killed = link.was_killed
        if self._links.get(replica) is link:
            del self._links[replica]
            if link.died:
                self._avoid(replica)

    def _avoid(self, replica: str) -> None:
        self._avoided_until_s[replica] = time.monotonic() + AVOIDED_S
        self._affinity.forget(replica)

    def _end(self, request_id: int, placed: Placed, error: LocalrunError, finish: wire.Finish) -> None:
        is_error = finish is wire.Finish.ERROR
        placed.on_delta(
            wire.Delta(
                request_id, wire.Phase.DONE, 0, 0, finish=finish, error_code=error.code if is_error else None,
                error_message=error.message if is_error else None,
                retry_after_s=getattr(error, "retry_after_s", None),
            ),
            time.monotonic(),
        )  # fmt: skip

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Placed:
    """A request and where it is: its job's sink, as the replica's link sees it."""

    def __init__(self, sink: Sink, message: wire.Submit | wire.Embed, released: Callable[[], object]) -> None:
        self._sink, self._released = sink, released
        self.prompt, self.work = prompt_of(message), Work(message)
        self.replica = ""
        self.link: EngineLink | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._sink.id

    @property
    def record(self) -> RequestRecord:
        return self._sink.record

    def on_started(self, started: wire.Started) -> None:
        self.work.on_started(started)
        self._sink.on_started(started)

    def on_delta(self, delta: wire.Delta, sent_at_s: float) -> None:
        self.work.on_delta(delta)
        if delta.finish is not None:
            self._released()
        self._sink.on_delta(delta, sent_at_s)

    def on_engine_gone(self, error: LocalrunError, *, is_blamed: bool, is_alone: bool) -> bool:
        self._released()
        return self._sink.on_engine_gone(error, is_blamed=is_blamed, is_alone=is_alone)


# A replica's engine is open; a link asks for it all the same.
_NOTHING_TO_OPEN = wire.Open(
    model_path="", n_slots=0, n_kv_cells=0, n_batch=0, n_threads=0, n_gpu_layers=0, kv_type="", target_itl_s=0.0,
    ram_cache_bytes=0, max_queue=0,
)  # fmt: skip


def _is_alike(one: wire.Ready, other: wire.Ready) -> bool:
    """Whether a request means the same on both."""
    fields = ("n_ctx", "n_vocab", "control_tokens", "eog_tokens", "n_embd", "media", "audio_rate_hz")
    return all(getattr(one, field) == getattr(other, field) for field in fields)
