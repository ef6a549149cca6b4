"""Snapshots in a file, one JSON document a line, and a daemon that plays them back.

A recording is what `/localrun/v1/events` sent, unchanged, so other programs read it as easily. Each line is written
whole and at once: a recording that was cut off by a crash lacks its last line at most.

Does not: hold chats; nothing but the monitor can be shown from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from localrun.errors import DaemonUnreachable
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
    """What the TUI takes for a daemon, and is a file. `speed` 2 plays twice as fast."""

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

    # What a daemon does besides (`daemon.Daemon`).
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
