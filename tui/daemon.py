"""The daemon as the screens know it: a client, or a recording that stands in for one; and streams that are kept open,
as the one of events is all the time.

A recording is what `/localrun/v1/events` sent, unchanged, one JSON document a line, so other programs read it as
easily. Each line is written whole and at once: a recording that was cut off by a crash lacks its last line at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from localrun.client import Client
from localrun.errors import DaemonUnreachable, LocalrunError
from localrun.snapshot import Snapshot

# A pause in the recording (a machine that slept) is not waited for in full.
_LONGEST_PAUSE_S = 3.0


class Recorder:
    """Appends to a new file. Raises OSError (also for one that is there already: nothing is overwritten)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("xb", buffering=0)
        path.chmod(0o600)
        self._encoder = msgspec.json.Encoder()

    def write(self, snapshot: Snapshot) -> None:
        self._file.write(self._encoder.encode(snapshot) + b"\n")

    def close(self) -> None:
        self._file.close()


class Replay:
    """What the screens take for a daemon, and is a file: nothing but the monitor can be shown from it. `speed` 2 plays
    twice as fast."""

    def __init__(self, path: Path, *, speed: float = 1.0, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        self._path = path
        self._speed = speed
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def events(self, hz: int = 4) -> AsyncGenerator[Snapshot, None]:
        """Raises DaemonUnreachable at the end of the file: there is nothing after it."""
        before_s: float | None = None
        for snapshot in snapshots(self._path):
            pause_s = 0.0 if before_s is None else snapshot.time_s - before_s
            before_s = snapshot.time_s
            await self._sleep(min(_LONGEST_PAUSE_S, max(0.0, pause_s)) / self._speed)
            yield snapshot
        raise DaemonUnreachable("the recording is over; Ctrl-R plays it again")

    async def _nothing(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        nothing: list[Any] = []
        for piece in nothing:
            yield piece
        await self._refuse()

    async def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DaemonUnreachable("this is a recording; there is no daemon behind it")

    # What a daemon does besides.
    chat = logs = pull = _nothing
    cancel = models = options = show = fit = load = unload = remove = catalog = search = _refuse
    pulls = cancel_pull = usage = _refuse


def snapshots(path: Path) -> Iterator[Snapshot]:
    """Those of a recording, up to the first line that is none. Raises DaemonUnreachable when the file cannot be read or
    holds no snapshot at all."""
    n_found = 0
    try:
        with path.open("rb") as file:
            for text in file:
                try:
                    snapshot = msgspec.json.decode(text, type=Snapshot)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    break
                n_found += 1
                yield snapshot
    except OSError as error:
        raise DaemonUnreachable(f"the recording {path} cannot be read: {error.strerror or error}") from error
    if not n_found:
        raise DaemonUnreachable(f"{path} is not a recording of the monitor")


Daemon = Client | Replay
"""Entered once, at start, and left when the app ends. Every method raises errors of `localrun.errors`,
`DaemonUnreachable` when nobody answers. A test hands in something smaller."""

Connect = Callable[[str, str], Daemon]
"""Makes a client from a base URL and the name it gives itself."""


RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)

SNAPSHOTS_PER_S = 4

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class Feed(Generic[T]):
    """Keeps a stream of the daemon open, as a worker and for as long as that runs. One that ends or fails is opened
    again after a pause that grows, and at once when asked.

    `open` opens it; `take` gets everything that comes, `on_lost` why the stream ended, each time it did.
    `retry_delays_s` are the pauses after the first, second, ... failure in a row; the last one repeats.
    """

    open: Callable[[], AsyncGenerator[T, None]]
    take: Callable[[T], None]
    on_lost: Callable[[str], None]
    retry_delays_s: Sequence[float] = RETRY_DELAYS_S
    _retry: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self) -> None:
        failures = 0
        while True:
            reason = "it closed the connection"
            try:
                async with aclosing(self.open()) as stream:
                    async for piece in stream:
                        failures = 0
                        self.take(piece)
            except LocalrunError as error:
                reason = error.message
            self.on_lost(reason)
            self._retry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.retry_delays_s[min(failures, len(self.retry_delays_s) - 1)]):
                    await self._retry.wait()
            failures += 1

    def retry_now(self) -> None:
        """Ends the current pause, if there is one."""
        self._retry.set()
