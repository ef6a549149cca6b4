"""The two messages between the daemon and the template worker.

They travel as the frames of `framing.py` (length prefix, msgpack) on the worker's stdin and stdout: one request, one
reply, in order. A reply without segments and without an error is also the worker's first frame, which says that it is
ready.

Does not: know about Jinja. The daemon imports this module and never the worker's own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localrun.errors import BadTemplate
from localrun.framing import FrameError
from localrun.wire import Segment

# The longest templates seen are about 20,000 characters.
MAX_TEMPLATE_CHARACTERS = 1_000_000


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Render `template` with `variables`. `cpu_s` is the processor time after which the worker ends itself, should the
    daemon not be there to kill it."""

    template: str
    variables: dict[str, Any]
    control_tokens: tuple[str, ...]
    output_bytes: int
    cpu_s: int


class RenderReply(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt, or an error as in `errors.by_code`."""

    segments: tuple[Segment, ...] = ()
    error_code: str | None = None
    error_message: str = ""


def check_length(template: str) -> None:
    """Raises BadTemplate for a template that nobody should look at any closer: not the daemon, nor the worker."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise BadTemplate(
            f"the chat template has {len(template)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}; shorten it",
            field="template",
        )


def decode_request(body: bytes) -> RenderRequest:
    """Raises FrameError when the body is not a request."""
    try:
        return _request.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error


def decode_reply(body: bytes) -> RenderReply:
    """Raises FrameError when the body is not a reply."""
    try:
        return _reply.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error


def refusal(message: str) -> RenderReply:
    """The reply for a template that failed or went over a limit."""
    return RenderReply(error_code=BadTemplate.code, error_message=message)


_request = msgspec.msgpack.Decoder(RenderRequest)
_reply = msgspec.msgpack.Decoder(RenderReply)
