"""What a model's reply consists of, and what turns its text into that while it streams.

The one vocabulary between the parsers of this package and the API families: a reply is a sequence of pieces, each of
which belongs to the content, to the thinking, or to the arguments of one tool call.

Pure. Does not: know any format (see `formats.py`), or anything about HTTP.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the reader. Never empty."""

    text: str


class Thinking(msgspec.Struct, frozen=True):
    """Text of the reasoning before or between. Never empty."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The model calls a tool. `index` counts a reply's calls from 0, `id` is unique in the daemon."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments. The parts of one call, joined, are one JSON object."""

    index: int
    text: str


Piece = Content | Thinking | CallStart | CallArguments


class ReplyParser(Protocol):
    """Turns one reply's text, in parts of any size, into pieces. Never raises for what a model wrote: a call that is
    none comes back as content."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text makes certain."""

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes. The parser is unusable after it."""
