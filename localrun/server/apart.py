"""Where the work on a request runs that grows with its body: of a large body in a thread, for the event loop has
others to serve meanwhile.

Whoever does that work knows no request, so whether its body is large stands in its context, as notices do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

# Less takes about a millisecond, and a thread costs a tenth of one.
THREAD_BYTES = 64 * 1024

# Of the request in whose context this is; set when its body is read (exchange.py).
IS_LARGE: ContextVar[bool] = ContextVar("is_large", default=False)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def apart(work: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
    """What `work` returns; in a thread where the request's body is large. Raises what it raises."""
    return await asyncio.to_thread(work, *args, **named) if IS_LARGE.get() else work(*args, **named)
