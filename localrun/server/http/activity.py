"""How long nobody has asked anything: outermost ASGI middleware that counts requests under way.

An open event stream is a request under way, so a daemon that somebody watches is not idle.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send


class Activity:
    """See the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._n_open = 0
        self._last_end_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._n_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_open -= 1
            self._last_end_s = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is open."""
        return 0.0 if self._n_open else time.monotonic() - self._last_end_s
