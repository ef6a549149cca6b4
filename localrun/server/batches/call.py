"""One line of a batch through its route, without HTTP: the route's own endpoint gets the line's body, and what it would
have sent is the answer. So a line means what the same request means, and every way it can end is an answer.

Does not: decide when, or what is made of the answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Scope

from localrun.errors import BadRequest
from localrun.server.http import failures
from localrun.server.http.access import Caller
from localrun.wire import Lane

# A line may say what any request may, except what would make it another one's guest or break its answer into pieces.
_OWN_FIELDS = ("lane", "latency", "deadline_s")


class LineResult(NamedTuple):
    """`code` is that of an error, as `X-Localrun-Error` has it."""

    status: int
    request_id: str
    code: str
    body: bytes


class _Known(msgspec.Struct):
    stream: Any = None
    lane: Any = None
    latency: Any = None
    deadline_s: Any = None


async def answer(endpoint: ASGIApp, path: str, body: bytes, *, client: str, caller: Caller) -> LineResult:
    """The answer of the route. `client` is who gets equal service, and `caller` whose request it is. Raises
    CancelledError alone."""
    try:
        _check(body)
    except BadRequest as error:
        return LineResult(error.status, "", error.code, failures.body(error, failures.shape_of(path)))
    sent: list[Message] = []
    has_body = True

    async def receive() -> Message:
        nonlocal has_body
        if has_body:
            has_body = False
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # this client never leaves; who cancels it cancels the task
        raise AssertionError("nobody sets it")

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await endpoint({**_scope(path, len(body), client), "localrun.caller": caller}, receive, send)
    finally:
        caller.leave()
    headers = dict(sent[0]["headers"])
    return LineResult(
        status=sent[0]["status"],
        request_id=headers.get(b"x-localrun-request", b"").decode("latin-1"),
        code=headers.get(b"x-localrun-error", b"").decode("latin-1"),
        body=b"".join(message.get("body", b"") for message in sent[1:]),
    )


def _check(body: bytes) -> None:
    """Raises BadRequest for fields that have no meaning here. What is wrong besides, the route says."""
    try:
        known = msgspec.json.decode(body, type=_Known)
    except msgspec.MsgspecError:
        return
    if known.stream:
        raise BadRequest("stream: the answers of a batch are whole; leave stream out", field="stream")
    for name in _OWN_FIELDS:
        if getattr(known, name) not in (None, str(Lane.BATCH)):
            raise BadRequest(f"{name}: the lines of a batch run in the lane batch; leave {name} out", field=name)


def _scope(path: str, n_bytes: int, client: str) -> Scope:
    headers = {
        "content-type": "application/json",
        "content-length": str(n_bytes),
        "user-agent": "localrun-batch",
        "x-localrun-client": client,
        "x-localrun-lane": Lane.BATCH.value,
        "x-localrun-latency": "throughput",
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()],
        "client": None,
        "server": None,
        "path_params": {},
    }
