"""A route's handler as an ASGI app: every way a request can end becomes one well-formed answer.

Runs in the daemon's event loop, one task per request. A LocalrunError becomes the family's error JSON, or the last
event of a stream; a client that left gets nothing; anything unexpected is logged with its traceback and answered with
a 500 that tells the client no details.

Does not: know any API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from localrun.errors import LocalrunError, Unavailable
from localrun.server.http.exchange import ClientGone, Exchange
from localrun.server.runtime import Runtime

Handler = Callable[[Runtime, Exchange], Awaitable[None]]

_log = logging.getLogger(__name__)


class Endpoint:
    """See the module. Not a function, so that starlette's routes call it as it is, without a Request and a Response."""

    def __init__(self, runtime: Runtime, handler: Handler) -> None:
        self._runtime = runtime
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._handler(self._runtime, exchange)
        except ClientGone:
            return
        except LocalrunError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:
            # Only the server cancels a request whose client is there: it is stopping, and will not wait any longer.
            await exchange.refuse(Unavailable("the daemon is stopping"))
            raise
        except Exception:
            _log.exception("%s %s failed", scope["method"], exchange.path)
            await exchange.refuse(LocalrunError("internal error; the daemon's log has the details"))


def route(path: str, runtime: Runtime, handler: Handler, *, methods: Sequence[str]) -> Route:
    """A starlette route to a handler. GET includes HEAD."""
    return Route(path, Endpoint(runtime, handler), methods=list(methods))
