"""What each field of a request's body does, for the document, from `field_notes.toml`.

A test holds that every field of every body has a note, and that no note is left over.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

# Structs inside bodies whose fields are explained by their own text.
INNER = frozenset({"LoraEntry", "Options", "StreamOptions"})


@cache
def _tables() -> dict[str, dict[str, str]]:
    return tomllib.loads(
        resources.files("localrun.server.openapi").joinpath("field_notes.toml").read_text(encoding="utf-8")
    )


@cache
def notes() -> dict[str, str]:
    return {key: note for table in _tables().values() for key, note in table.items()}


@cache
def common() -> frozenset[str]:
    """What many routes take; readers look for a route's own fields first."""
    return frozenset(_tables()["service"] | _tables()["sampling"]) - {"model", "stream"}


def note_of(struct: str, field: str) -> str:
    """The note of a body's field; empty for a field of any other struct."""
    own = notes().get(f"{struct}.{field}")
    if own is not None:
        return own
    return notes().get(field, "") if struct.endswith("Body") or struct in INNER else ""
