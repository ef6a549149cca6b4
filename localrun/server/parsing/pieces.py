"""What a model's reply consists of, and one reply as it comes.

The one vocabulary between the parsers of this package and the API families: a reply is a sequence of pieces, each of
which belongs to the content, to the thinking, or to the arguments of one tool call.
Does not: know any format (see `formats.py`), or anything about HTTP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from localrun.errors import Cancelled, EngineFailed
from localrun.wire import ChosenLogprob, Delta, Finish, Usage


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
    none comes back as content, but one that the reply's limit cut off is left out."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text makes certain."""

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """What was held back, when no more text comes; `is_cut` says that the limit ended it. The parser is unusable
        after it."""


class PlainParser:
    """A `ReplyParser` for what no chat format is in."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        return []


@dataclass
class Call:
    """A tool call. `arguments` are parts of the text of one JSON object."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def arguments_text(self) -> str:
        return "".join(self.arguments)


def whole_arguments(text: str) -> dict[str, Any] | None:
    """A call's arguments; None for one that the limit of the answer cut off: nobody can make it."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


@dataclass
class Gathered:
    """What a reply said. `logprobs` are of all its tokens, those of its thinking and calls included."""

    content: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[ChosenLogprob] = field(default_factory=list)

    @property
    def content_text(self) -> str:
        return "".join(self.content)

    @property
    def thinking_text(self) -> str:
        return "".join(self.thinking)


class Reply:
    """One reply as it comes: the parser of its text, and what it said so far.

    Runs in the task of the request. `take` gives the pieces of a delta, for who streams them on; `gathered` is their
    sum, for who sends it whole.

    Does not: know an API's form.

    `n_thinking` counts the tokens that came with thinking; one that ends it counts too. `n_calls` are those that began,
    and at the end those that are whole: nobody can make one that was cut off (`is_in_call`), by the limit or where the
    client wanted the answer to stop.
    """

    def __init__(self, parser: ReplyParser) -> None:
        self.n_thinking = 0
        self.n_calls = 0
        self.is_in_call = False
        self._arguments: list[str] = []  # of the last call
        self.gathered = Gathered()
        self._parser = parser
        self._is_thinking = False

    def take(self, delta: Delta) -> list[Piece]:
        """The pieces that a delta makes certain; after the final one nothing is held back."""
        pieces = self._parser.feed(delta.text) if delta.text else []
        if delta.finish is not None:
            pieces += self._parser.finish(is_cut=delta.finish is Finish.LENGTH)
        for piece in pieces:
            self._is_thinking = isinstance(piece, Thinking)
            if isinstance(piece, CallStart):
                self.n_calls += 1
                self._arguments.clear()
            elif isinstance(piece, CallArguments):
                self._arguments.append(piece.text)
        if delta.finish is not None and whole_arguments("".join(self._arguments)) is None:
            self.is_in_call = True
            self.n_calls -= 1
        if self._is_thinking:
            self.n_thinking += len(delta.tokens)
        return pieces

    def gather(self, delta: Delta) -> None:
        """Takes a delta in, and keeps what it said but for a call that was cut off."""
        self.gathered.logprobs += delta.logprobs or ()
        for piece in self.take(delta):
            self._keep(piece)
        del self.gathered.calls[self.n_calls :]

    def _keep(self, piece: Piece) -> None:
        gathered = self.gathered
        if isinstance(piece, Content):
            gathered.content.append(piece.text)
        elif isinstance(piece, Thinking):
            gathered.thinking.append(piece.text)
        elif isinstance(piece, CallStart):
            gathered.calls.append(Call(piece.id, piece.name))
        elif isinstance(piece, CallArguments):
            gathered.calls[piece.index].arguments.append(piece.text)


def ended(delta: Delta) -> tuple[Finish, Usage]:
    """How a final delta ended its job. Raises Cancelled: `stop` would be a lie; and EngineFailed without counts."""
    if delta.finish is None or delta.finish is Finish.CANCELLED:
        raise Cancelled("the request was cancelled")
    if delta.usage is None:
        raise EngineFailed("the engine ended a request without saying what it used")
    return delta.finish, delta.usage


def dump_json(value: Any) -> str:
    """JSON as clients get it: nothing escaped that need not be, but half a surrogate pair, which no UTF-8 can carry."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
