"""Which field of the body an error is about: neither the engine nor the prompt's making knows where things came from.

Does not: check anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localrun.errors import BadRequest, ContextExceeded


@contextmanager
def naming(field: str, *, effort: str = "reasoning_effort") -> Iterator[None]:
    """A prompt that is too long is named as `field`; thinking that the model does not know, as `effort`."""
    try:
        yield
    except ContextExceeded as error:
        error.field = field
        raise
    except BadRequest as error:
        if error.field != "think":
            raise
        raise BadRequest(
            f"{effort}: this model does not support thinking; leave it out, or use 'none'", field=effort
        ) from None
