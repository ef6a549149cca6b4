"""Rendering chat templates from the daemon, in a worker process (`worker_process.py`).

Owner: the daemon's event loop. Does not: load Jinja into the daemon, or decide which template and which variables to
use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from localrun import errors, framing
from localrun.server.http.loop_watch import apart
from localrun.server.worker_process import DiedError, OverranError, WorkerProcess
from localrun.wire import RenderRequest, Segment

# The longest templates seen are about 20,000 characters.
MAX_TEMPLATE_CHARACTERS = 1_000_000


class TemplateOverrunError(errors.BadTemplate):
    """A render took its worker with it: it would do so again, and every try costs the others their worker."""


def check_length(template: str) -> None:
    """Raises BadTemplate for a template that nobody should look at any closer: not the daemon, nor the worker."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise errors.BadTemplate(
            f"the chat template has {len(template)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}; shorten it",
            field="template",
        )


class TemplateRenderer:
    """Owns the worker. `timeout_s` and `output_bytes` bound one render."""

    def __init__(self, *, timeout_s: float, output_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._output_bytes = output_bytes
        self._worker = WorkerProcess(
            "localrun.server.templates.worker", framing.decode_from_renderer, name="template", timeout_s=timeout_s
        )

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._worker.pid

    async def start(self) -> None:
        """Start the worker, so that the first render need not wait. Raises Unavailable when it does not come up."""
        await self._worker.start()

    async def stop(self) -> None:
        """End the worker. A render under way ends with Unavailable."""
        await self._worker.stop()

    async def render(
        self, template: str, variables: dict[str, Any], control_tokens: Sequence[str]
    ) -> tuple[Segment, ...]:
        """The prompt of a conversation.

        Text of a control token inside the variables (except those named `*_token`) comes back in untrusted segments.
        Raises BadTemplate (broken, too long, against the sandbox, over the output limit), TemplateOverrunError (a
        BadTemplate: over the time limit, or it ended its worker twice), BadRequest (the template's own
        `raise_exception`; variables that are no valid data) and Unavailable (no worker).
        """
        check_length(template)
        request = RenderRequest(
            template=template,
            variables=variables,
            control_tokens=tuple(control_tokens),
            output_bytes=self._output_bytes,
            cpu_s=math.ceil(self._timeout_s) + 1,
        )
        try:
            frame = await apart(framing.encode, request)
        except UnicodeEncodeError:
            raise errors.BadRequest("the messages contain half of a surrogate pair", field="messages") from None
        except framing.FrameTooLarge as error:
            raise errors.TooLarge(f"the messages are too large for a chat template ({error})") from None
        except RecursionError:
            raise errors.BadRequest("the messages nest too deeply", field="messages") from None
        try:
            reply = await self._worker.ask(frame)
        except OverranError:
            raise TemplateOverrunError(
                f"the chat template ran longer than {self._timeout_s:g} s (setting template_timeout_s)"
            ) from None
        except DiedError:
            raise TemplateOverrunError("the chat template ended its worker process twice") from None
        if reply.error_code is not None:
            raise errors.by_code(reply.error_code, reply.error_message)
        return reply.segments
