"""What a door, or a command, and its bridge say to each other: one request on the bridge's standard input, and what
comes of it on its standard output, in frames as on all pipes.

The bridge is a process of its own because Ray ends whatever process it is in when the head is lost for too long.
`ask` runs one for a single question; `Watch` keeps one that says what there is, at least every second, and starts
another when it ends.

Does not: import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import BinaryIO, cast

import msgspec

from localrun import framing
from localrun.cluster import settings
from localrun.cluster.affinity import Cost
from localrun.cluster.description import Description, Has
from localrun.errors import LocalrunError, NotSupported, Unavailable
from localrun.processes import HIDDEN, end_child, last_words
from localrun.snapshot import EngineRow

COMMAND = (sys.executable, "-m", "localrun.cluster.on_ray.bridge")
START_AGAIN_S = 2.0
READ_BYTES = 1 << 16
# So long a request waits for the bridge's choice; when that was too late, requests do not wait for the next seconds.
CHOICE_S = 0.05
LEFT_ALONE_S = 5.0

_log = logging.getLogger(__name__)


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself. `id` is Serve's; without an engine it says `why_not`, else `row` has what people
    are shown. `work_tokens` is what it has still to compute for all doors, `recent` are digests of what it computed
    last, for those who follow, and `wait_s` how long what waits there last is expected to wait."""

    id: str
    node: str
    host: str
    port: int
    pid: int
    fingerprint: str
    n_slots: int = 0
    n_running: int = 0
    n_queued: int = 0
    tokens_per_s: float = 0.0
    why_not: str = ""
    row: EngineRow | None = None
    work_tokens: float = 0.0
    recent: bytes = b""
    wait_s: float | None = None


class AppReport(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is Serve's word for it, and `message` says what is wrong."""

    description: Description
    n_wanted: int
    state: str
    message: str = ""
    replicas: tuple[ReplicaReport, ...] = ()

    @property
    def ready(self) -> list[ReplicaReport]:
        """Those that run what is described; while it is replaced, the version before runs, too."""
        fingerprint = self.description.fingerprint
        return [one for one in self.replicas if one.fingerprint == fingerprint and not one.why_not]

    @property
    def n_ready(self) -> int:
        return len(self.ready)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is alive, draining or dead."""

    node: str
    id: str
    address: str
    state: str
    is_head: bool
    n_cpus: float
    n_gpus: float
    has: Has = Has()

    @property
    def files_address(self) -> str:
        """Where it gives files of models, HOST:PORT; "" where it does not, or is gone."""
        return f"{self.address}:{self.has.files_port}" if self.has.files_port and self.state != "dead" else ""


class Event(msgspec.Struct, frozen=True):
    """Something that happened, at Unix time, for a person."""

    at_s: float
    text: str


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True, tag="cluster"):
    """`events` are the last ones, oldest first, which no bridge knows: doors keep them (`view.py`)."""

    nodes: tuple[NodeReport, ...]
    apps: tuple[AppReport, ...]
    events: tuple[Event, ...] = ()


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was asked for is so."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """One `ClusterReport`."""


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """A `ClusterReport` every second, until standard input ends; `Choose` and `Wake` may come meanwhile."""


class Choose(msgspec.Struct, frozen=True, kw_only=True, tag="choose"):
    """Which replica is to compute a prompt (`affinity.pick`): one `Chosen`, of the same `id`."""

    id: int
    app: str
    first: bytes
    costs: dict[str, Cost]


class Chosen(msgspec.Struct, frozen=True, tag="chosen"):
    """Without `replica`, nobody knows."""

    id: int
    replica: str


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """A request waits for an app that was scaled to nothing."""

    app: str


class Deploy(msgspec.Struct, frozen=True, kw_only=True, tag="deploy"):
    """Reports while replicas start."""

    description: Description
    n_replicas: int
    wait_s: float


class Undeploy(msgspec.Struct, frozen=True, kw_only=True, tag="undeploy"):
    model: str


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    node: str
    deadline_s: int


ToBridge = Look | Follow | Choose | Wake | Deploy | Undeploy | Drain
FromBridge = ClusterReport | Chosen | Done | Failed

_to_bridge: msgspec.msgpack.Decoder[ToBridge] = msgspec.msgpack.Decoder(ToBridge)
_from_bridge: msgspec.msgpack.Decoder[FromBridge] = msgspec.msgpack.Decoder(FromBridge)
# Each takes a body, and raises framing.FrameError.
decode_to_bridge = partial(framing.decoded, _to_bridge)
decode_from_bridge = partial(framing.decoded, _from_bridge)


def require_ray() -> None:
    """Raises NotSupported without the extra."""
    if importlib.util.find_spec("ray") is None:
        raise NotSupported("clusters need Ray, which is not installed: pip install 'localrun[cluster]'")


def ask(request: ToBridge) -> Iterator[ClusterReport | Done]:
    """What a bridge of one's own says to it. Raises Unavailable when it fails, and NotFound where there is no cluster.
    Closing the iterator ends the bridge."""
    environment = settings.environment(settings.membership())
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, **HIDDEN
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(framing.encode(request))
            process.stdin.flush()
            while (body := framing.read_body(cast("BinaryIO", process.stdout))) is not None:
                said = decode_from_bridge(body)
                if isinstance(said, Failed):
                    raise Unavailable(said.message)
                if isinstance(said, ClusterReport | Done):
                    yield said
                if isinstance(said, Done):
                    return
            log.seek(0)
            words = last_words(log.read().decode("utf-8", "replace"))
            raise Unavailable(f"the process that asks Ray ended without an answer{words}")
        except (OSError, framing.FrameError) as error:
            raise Unavailable(f"the process that asks Ray does not answer: {error}") from None
        finally:
            process.kill()
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.stdout.close()
            process.wait()


class Watch:
    """A bridge that follows the cluster, and its successors. `on_report` is called in the event loop."""

    def __init__(self, on_report: Callable[[ClusterReport], None]) -> None:
        self._on_report = on_report
        self._task: asyncio.Task[None] | None = None
        self._stdin: asyncio.StreamWriter | None = None  # once it has said something
        self._numbers = itertools.count(1)
        self._choices: dict[int, asyncio.Future[str]] = {}
        self._left_alone_until_s = 0.0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def choose(self, app: str, first: bytes, costs: Mapping[str, Cost]) -> str:
        """Which replica computes a prompt, as Serve's router has it; "" when nobody says so in time."""
        loop = asyncio.get_running_loop()
        if self._stdin is None or loop.time() < self._left_alone_until_s:
            return ""
        number = next(self._numbers)
        choice: asyncio.Future[str] = loop.create_future()
        self._choices[number] = choice
        self._stdin.write(framing.encode(Choose(id=number, app=app, first=first, costs=dict(costs))))
        try:
            async with asyncio.timeout(CHOICE_S):
                chosen: str = await choice
                return chosen
        except TimeoutError:
            self._left_alone_until_s = loop.time() + LEFT_ALONE_S
            return ""
        finally:
            del self._choices[number]

    def wake(self, app: str) -> None:
        """See `Wake`."""
        if self._stdin is not None:
            self._stdin.write(framing.encode(Wake(app)))

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except (OSError, framing.FrameError, LocalrunError) as error:
                _log.warning("the cluster's bridge failed: %s", error)
            # What it said last holds until the next one speaks.
            await asyncio.sleep(START_AGAIN_S)

    async def _follow(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env=settings.environment(settings.membership()), **HIDDEN,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(framing.encode(Follow()))
            frames = framing.FrameBuffer()
            while data := await process.stdout.read(READ_BYTES):
                for body in frames.feed(data):
                    said = decode_from_bridge(body)
                    if isinstance(said, ClusterReport):
                        self._stdin = process.stdin
                        self._on_report(said)
                    elif isinstance(said, Chosen):
                        if (choice := self._choices.get(said.id)) is not None and not choice.done():
                            choice.set_result(said.replica)
                    elif isinstance(said, Failed):
                        _log.warning("the cluster cannot be seen: %s", said.message)
        finally:
            self._stdin = None
            await end_child(process)
