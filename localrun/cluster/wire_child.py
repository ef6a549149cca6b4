"""An engine on another machine, as the link to it knows it: what `EngineChild` is for a process.

Runs in the door's event loop, with plain callbacks. `spawn` connects, and the replica's `Welcome` is what the engine's
`Ready` is elsewhere: it has been opened already, so `Open` goes nowhere. When the connection ends, so has the engine
for this door, and the replica's own verdict comes before that if there is one.

Invariant: `on_end` is called once, last of all, and not before `spawn` has returned.
Does not: choose a replica (link.py), or know what the messages mean.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from localrun import framing, wire
from localrun.cluster import frames
from localrun.server.engines.link import End, EndKind

CONNECT_TIMEOUT_S = 5.0
# Pictures and recordings that a replica keeps for this connection, in which conversations send them again each turn.
MEDIA_BYTES = 256 * 1024 * 1024
PIECE_BYTES = 1024 * 1024


class Address(NamedTuple):
    """Where a replica listens, and the name that people know its machine by."""

    host: str
    port: int
    node: str


class WireChild(asyncio.Protocol):
    """See the module. Without `tls` everything goes in the clear, which is for one machine alone."""

    def __init__(
        self,
        address: Address,
        hello: frames.Hello,
        tls: ssl.SSLContext | None = None,
        *,
        on_message: Callable[[wire.FromEngine], None],
        on_line: Callable[[str], None],
        on_end: Callable[[End], None],
    ) -> None:
        self._address, self._hello, self._tls = address, hello, tls
        self._on_message, self._on_line, self._on_end = on_message, on_line, on_end
        self._transport: asyncio.Transport | None = None
        self._frames = framing.FrameBuffer()
        self._writable, self._ended = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._heard_at_s = time.monotonic()
        self._beats: asyncio.TimerHandle | None = None
        self._verdict: End | None = None
        self._has_media: OrderedDict[bytes, int] = OrderedDict()
        self._sending_media = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """A process on another machine has none here."""
        return None

    async def spawn(self, argv: Sequence[str]) -> None:
        """Connects; `argv` is of no use. Raises OSError."""
        loop = asyncio.get_running_loop()
        host, port, node = self._address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(
                    lambda: self, host, port, ssl=self._tls, server_hostname=node if self._tls else None
                )
        except TimeoutError:
            raise OSError(f"{node} ({host}:{port}) does not answer") from None

    def write(self, message: wire.ToEngine) -> None:
        """See `Child`."""
        if not isinstance(message, wire.Open):
            self._send(frames.aged(message, time.monotonic()))

    async def writable(self) -> None:
        await self._writable.wait()

    async def bring(self, media: Sequence[wire.Media]) -> None:
        """Right before a message with them: the replica has the bytes then. Raises OSError for a file that is gone."""
        async with self._sending_media:
            for one in media:
                if one.digest not in self._has_media:
                    await self._send_file(one)
                self._has_media.move_to_end(one.digest)
            for digest in list(self._has_media)[: -len(media)]:
                if sum(self._has_media.values()) <= MEDIA_BYTES:
                    break
                del self._has_media[digest]
                self._send(frames.Forget(digest))

    async def _send_file(self, media: wire.Media) -> None:
        content = await asyncio.to_thread(Path(media.path).read_bytes)
        for start in range(0, max(1, len(content)), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            is_last = start + PIECE_BYTES >= len(content)
            self._send(frames.Bytes(digest=media.digest, data=piece, is_last=is_last))
            await self.writable()
        self._has_media[media.digest] = len(content)

    def kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def stop(self) -> None:
        """Leaves the replica, whose engine goes on; what this door has there is cancelled."""
        if self._transport is not None:
            self._transport.close()
            await self._ended.wait()

    # --- called by the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._hello)
        self._heard_at_s = time.monotonic()
        self._beat()

    def data_received(self, data: bytes) -> None:
        now_s = self._heard_at_s = time.monotonic()
        if self._verdict is not None:
            return
        try:
            for body in self._frames.feed(data):
                self._take(frames.decode_from_replica(body, now_s))
        except framing.FrameError as error:
            self._leave(End(EndKind.BROKE_PROTOCOL, f"on {self._address.node} broke the protocol ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._beats is not None:
            self._beats.cancel()
        self._ended.set()
        self._writable.set()
        why = f": {exc}" if exc is not None and str(exc) else ""
        # A machine that is lost tells nobody why. As long as nothing else is known it was not the requests.
        self._on_end(self._verdict or End(EndKind.ENDED_BY_OTHERS, f"on {self._address.node} is out of reach{why}"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- inside --------------------------------------------------------------------------------------------------

    def _take(self, message: frames.FromReplica) -> None:
        if isinstance(message, frames.Welcome):
            self._on_message(message.ready)
        elif isinstance(message, frames.Refused):
            self._on_message(wire.OpenFailed(code=message.code, message=message.message))
        elif isinstance(message, frames.Ended):
            self._leave(message.end)
        elif not isinstance(message, frames.Beat):
            self._on_message(message)

    def _leave(self, verdict: End) -> None:
        self._verdict = verdict
        self.kill()

    def _send(self, message: object) -> None:
        frame = framing.encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _beat(self) -> None:
        silent_s = time.monotonic() - self._heard_at_s
        if silent_s > frames.SILENCE_S:
            self._leave(End(EndKind.ENDED_BY_OTHERS, f"on {self._address.node} has said nothing for {silent_s:.0f} s"))
            return
        self._send(frames.Beat())
        self._beats = asyncio.get_running_loop().call_later(frames.BEAT_S, self._beat)
