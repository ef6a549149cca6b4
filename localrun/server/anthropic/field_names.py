"""Errors about a prompt, in the words that Anthropic's clients know.

Does not: check anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from localrun.errors import BadRequest, ContextExceeded

# The prompt's length, and that of the context.
_NUMBERS = 2


@contextmanager
def naming() -> Iterator[None]:
    """A tool's schema is its `input_schema`. A prompt that is too long says so as Anthropic does: agents look for these
    words, and then shorten their conversation by themselves."""
    try:
        yield
    except ContextExceeded as error:
        numbers = re.findall(r"\d+", error.message)
        if len(numbers) >= _NUMBERS:
            error.message = f"prompt is too long: {numbers[0]} tokens > {numbers[1]} maximum; {error.message}"
        raise
    except BadRequest as error:
        field = (error.field or "").replace(".function.parameters", ".input_schema")
        if field == error.field:
            raise
        message = error.message.replace(".function.parameters", ".input_schema")
        raise BadRequest(message, field=field) from None
