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
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

import msgspec

from localrun import framing
from localrun.cluster import settings
from localrun.cluster.description import Description
from localrun.cluster.placement import Has
from localrun.errors import LocalrunError, NotSupported, Unavailable
from localrun.processes import HIDDEN, last_words
from localrun.server.engines.child import FrameBuffer

COMMAND = (sys.executable, "-m", "localrun.cluster.bridge")
START_AGAIN_S = 2.0
READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself. `id` is Serve's; without an engine it says `why_not`."""

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


class AppReport(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is Serve's word for it, and `message` says what is wrong."""

    description: Description
    n_wanted: int
    state: str
    message: str = ""
    replicas: tuple[ReplicaReport, ...] = ()

    @property
    def n_ready(self) -> int:
        return sum(not replica.why_not for replica in self.replicas)


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


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True, tag="cluster"):
    nodes: tuple[NodeReport, ...]
    apps: tuple[AppReport, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was asked for is so. `note` is for a person."""

    note: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """One `ClusterReport`."""


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """A `ClusterReport` every second, until standard input ends."""


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


ToBridge = Look | Follow | Deploy | Undeploy | Drain
FromBridge = ClusterReport | Done | Failed

_to_bridge: msgspec.msgpack.Decoder[ToBridge] = msgspec.msgpack.Decoder(ToBridge)
_from_bridge: msgspec.msgpack.Decoder[FromBridge] = msgspec.msgpack.Decoder(FromBridge)


def decode_to_bridge(body: bytes) -> ToBridge:
    """Raises framing.FrameError."""
    return framing.decoded(_to_bridge, body)


def decode_from_bridge(body: bytes) -> FromBridge:
    """Raises framing.FrameError."""
    return framing.decoded(_from_bridge, body)


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

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

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
            frames = FrameBuffer()
            while data := await process.stdout.read(READ_BYTES):
                for body in frames.feed(data):
                    said = decode_from_bridge(body)
                    if isinstance(said, ClusterReport):
                        self._on_report(said)
                    elif isinstance(said, Failed):
                        _log.warning("the cluster cannot be seen: %s", said.message)
        finally:
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
