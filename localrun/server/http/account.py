"""What is known of an HTTP request when it ends, for `/metrics` and the log of requests (`metering/request_log.py`).

`Limits` makes one for every request and says at the end how long it took; whoever answers fills it in.
Does not: hold anything of what was asked or answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from localrun.errors import LocalrunError

if TYPE_CHECKING:
    from localrun.server.jobs.generation import Generation

# Where it is found in a request's scope.
ACCOUNT = "localrun.account"
# Nobody was there any more to be answered; as nginx has it.
CLIENT_GONE = 499


class Account(msgspec.Struct, kw_only=True):
    """`status` is the status line's, 0 before there is one; `error` the kind of what the client was told, also as the
    last event of a stream (the error itself would keep the body, by its traceback); `request_id` the one in the
    answer's header. `records` are of its answers."""

    status: int = 0
    error: type[LocalrunError] | None = None
    request_id: str = ""
    records: list[Generation] = []
