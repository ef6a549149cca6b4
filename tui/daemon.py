"""What the TUI needs of a client of the daemon.

`localrun.client.Client` has this shape; a test hands in something smaller. Every method raises errors of
`localrun.errors`, `DaemonUnreachable` when nobody answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from localrun.client import ChatPiece, PullPiece
from localrun.snapshot import LogLine, PullRow, Snapshot


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


Connect = Callable[[str, str], Daemon]
"""Makes a client from a base URL and the name it gives itself."""
