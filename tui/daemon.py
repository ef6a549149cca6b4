"""What the TUI needs of a client of the daemon, and the one event stream that it keeps open.

`localrun.client.Client` has the shape of `Daemon`; a test hands in something smaller. Every method raises errors of
`localrun.errors`, `DaemonUnreachable` when nobody answers. Nothing but the event feed polls the daemon all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from localrun.client import ChatPiece, PullPiece
from localrun.errors import LocalrunError
from localrun.snapshot import LogLine, PullRow, Snapshot, UsageReport


class Daemon(Protocol):
    """A connection to one daemon. Entered once, at start, and left when the app ends."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *exc_info: Any) -> Any: ...

    def chat(
        self,
        model: str,
        messages: list[dict[str, Any]],
        *,
        options: dict[str, Any] | None = ...,
        think: bool | str | None = ...,
        lane: str = ...,
        tools: list[dict[str, Any]] | None = ...,
    ) -> AsyncGenerator[ChatPiece, None]:
        """The answer, piece by piece. Closing the generator cancels the request in the daemon."""
        ...

    def events(self, hz: int = ...) -> AsyncGenerator[Snapshot, None]:
        """Snapshots, for as long as the daemon lives."""
        ...

    def logs(self, since: int = ...) -> AsyncGenerator[LogLine, None]:
        """Lines of the daemon's log, for as long as it lives."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Ends any request. False when there was none to end."""
        ...

    async def models(self) -> list[dict[str, Any]]:
        """The rows of `/api/tags`."""
        ...

    async def options(self) -> dict[str, Any]:
        """The options of a chat by name, each with the JSON schema of its values."""
        ...

    # Those of the models screen, as `Client` has them.

    async def show(self, model: str) -> dict[str, Any]: ...

    async def fit(self, model: str) -> dict[str, Any]: ...

    async def load(self, model: str) -> None: ...

    async def unload(self, model: str) -> None: ...

    async def remove(self, model: str) -> dict[str, Any]: ...

    async def catalog(self) -> list[dict[str, Any]]: ...

    async def search(self, query: str) -> dict[str, Any]: ...

    def pull(self, model: str) -> AsyncGenerator[PullPiece, None]: ...

    async def pulls(self) -> list[PullRow]: ...

    async def cancel_pull(self, model: str) -> None: ...

    async def usage(self, by: str, days: int) -> UsageReport: ...


Connect = Callable[[str, str], Daemon]
"""Makes a client from a base URL and the name it gives itself."""


RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)

SNAPSHOTS_PER_S = 4


class EventFeed:
    """Keeps one event stream open, as one worker of the app and for as long as that runs. A stream that ends or fails
    is opened again after a pause that grows, and at once when asked. Does not: keep snapshots, or touch widgets.

    `on_snapshot` gets every snapshot; `on_lost` why the stream ended, each time it did.

    `retry_delays_s` are the pauses after the first, second, ... failure in a row; the last one repeats.
    """

    def __init__(
        self,
        daemon: Daemon,
        *,
        on_snapshot: Callable[[Snapshot], None],
        on_lost: Callable[[str], None],
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self._daemon = daemon
        self._on_snapshot = on_snapshot
        self._on_lost = on_lost
        self._retry_delays_s = retry_delays_s
        self._retry = asyncio.Event()

    async def run(self) -> None:
        """Never returns; ends by being cancelled."""
        failures = 0
        while True:
            reason = "it closed the connection"
            try:
                async with aclosing(self._daemon.events(SNAPSHOTS_PER_S)) as snapshots:
                    async for snapshot in snapshots:
                        failures = 0
                        self._on_snapshot(snapshot)
            except LocalrunError as error:
                reason = error.message
            self._on_lost(reason)
            await self._pause(self._retry_delays_s[min(failures, len(self._retry_delays_s) - 1)])
            failures += 1

    def retry_now(self) -> None:
        """Ends the current pause, if there is one."""
        self._retry.set()

    async def _pause(self, delay_s: float) -> None:
        self._retry.clear()
        try:
            async with asyncio.timeout(delay_s):
                await self._retry.wait()
        except TimeoutError:
            return
