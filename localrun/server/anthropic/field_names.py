"""Errors about a prompt, by the names that Anthropic's clients know.

Does not: check anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localrun.errors import BadRequest, ContextExceeded


@contextmanager
def naming() -> Iterator[None]:
    """A tool's schema is its `input_schema`."""
    try:
        yield
    except ContextExceeded:
        raise
    except BadRequest as error:
        field = (error.field or "").replace(".function.parameters", ".input_schema")
        if field == error.field:
            raise
        message = error.message.replace(".function.parameters", ".input_schema")
        raise BadRequest(message, field=field) from None
