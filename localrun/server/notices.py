"""What a request asks for and does not get, although it is answered: each goes into the header `X-Localrun-Ignored`,
and into the log.

Whoever leaves something out knows no request, and those who answer know no schema; so the notices of a request wait in
its context, in which threads that work for it run as well.

Does not: hold a request up. Does not: know HTTP (exchange.py writes the header).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A header has room for a few; that there are more is said.
MAX_CHARACTERS = 1_000
MAX_NOTICES = 40

# Of the request in whose context this is; set when it begins (exchange.py).
NOTED: ContextVar[list[str] | None] = ContextVar("noted", default=None)
# Whether nothing of any schema may be left out, by the setting `strict_schemas`; set with it.
STRICT_SCHEMAS: ContextVar[bool] = ContextVar("strict_schemas", default=False)


def note(*texts: str) -> None:
    """Something was left out of what the request in whose context this is asks for. Nothing outside of one."""
    noted = NOTED.get()
    for text in texts:
        if noted is not None and len(noted) < MAX_NOTICES and text not in noted:
            noted.append(text)


@contextmanager
def collected() -> Iterator[list[str]]:
    """The notices of a part of the work, for who keeps its result: they are not noted otherwise."""
    noted: list[str] = []
    token = NOTED.set(noted)
    try:
        yield noted
    finally:
        NOTED.reset(token)


def shown(noted: list[str]) -> str:
    """One line of printable ASCII for a header, at most `MAX_CHARACTERS` long."""
    text = "; ".join(noted).encode("ascii", "backslashreplace").decode()
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."
