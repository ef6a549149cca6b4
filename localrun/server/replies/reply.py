"""One reply being read: what came in, what is known of the tools, and the pieces that are ready.

`StreamingParser` is the `ReplyParser` of every format: it resumes the format's reader with each new text and hands over
what that made of it. Neighbouring texts of one kind come as one piece.

A call is held until it is whole, so that one that turns out malformed comes back as content; where the decoding was
constrained to well-formed calls (`streams`), its arguments are handed on as they come.

Pure but for call ids, which are random. Does not: know any format.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from localrun.server.replies import json_text
from localrun.server.replies.pieces import CallArguments, CallStart, Content, Piece, Thinking
from localrun.server.replies.source import Read, Source


class Reply:
    """See the module. `schemas` are the parameters of the tools that may be called, by name. More than `most_calls` are
    left out: the client has said that it takes no more."""

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], *, streams: bool, most_calls: int | None = None
    ) -> None:
        self.source = Source()
        self.schemas = schemas
        self.streams = streams
        self._most_calls = most_calls
        self.n_calls = 0
        self.n_contents = 0
        self._ready: list[Piece] = []

    def content(self, text: str) -> None:
        if text:
            self.n_contents += 1
            last = self._ready[-1] if self._ready else None
            if isinstance(last, Content):
                self._ready[-1] = Content(last.text + text)
            else:
                self._ready.append(Content(text))

    def thinking(self, text: str) -> None:
        if text:
            last = self._ready[-1] if self._ready else None
            if isinstance(last, Thinking):
                self._ready[-1] = Thinking(last.text + text)
            else:
                self._ready.append(Thinking(text))

    def start_call(self, name: str) -> None:
        """Arguments that follow are this call's."""
        self._ready.append(CallStart(self.n_calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        index = self.n_calls - 1
        last = self._ready[-1] if self._ready else None
        if isinstance(last, CallArguments):
            self._ready[-1] = CallArguments(index, last.text + text)
        elif text:
            self._ready.append(CallArguments(index, text))

    def call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """A whole call."""
        if self._most_calls is None or self.n_calls < self._most_calls:
            self.start_call(name)
            self.arguments(json_text.dump(arguments))

    def take(self) -> list[Piece]:
        ready, self._ready = self._ready, []
        return ready


class StreamingParser:
    """See the module. `opened` is what the prompt already has of the reply: it is read first, and not the model's."""

    def __init__(self, reply: Reply, read: Callable[[Reply], Read[None]], *, opened: str = "") -> None:
        self._reply = reply
        self._run: Read[None] | None = read(reply)
        reply.source.put(opened)
        self._resume()

    def feed(self, text: str) -> list[Piece]:
        self._reply.source.put(text)
        self._resume()
        return self._reply.take()

    def finish(self) -> list[Piece]:
        self._reply.source.end()
        while self._run is not None:
            self._resume()
        return self._reply.take()

    def _resume(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
