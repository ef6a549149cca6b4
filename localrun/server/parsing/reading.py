"""One reply while it is read, for all who read a part of it.

Pure but for call ids, which are random. Does not: know any format.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Thinking
from localrun.server.parsing.source import MalformedError, Source
from localrun.server.parsing.written import dump_json

# A model that opens so many calls without writing one is not calling anything, and every try reads the text again.
MAX_MALFORMED_CALLS = 64


class Reading:
    """One reply being read: what came in, what is known of the tools, and the pieces that are ready.

    `schemas` are the parameters of the tools that may be called, by name. More than `most_calls` are
    left out: the client has said that it takes no more. A reply that `must_call` has no content of its own.
    `is_silent` until there is more content than white space, and again after a call. `gap` is the white space round
    calls that content stood before (`has_spoken`); it comes back if more content follows. While `only_known_before` is
    a text, a call of no known tool is malformed, and one that has this text in it.
    """

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        streams: bool,
        most_calls: int | None = None,
        must_call: bool = False,
    ) -> None:
        self.source = Source()
        self.schemas = schemas
        self.streams = streams
        self.is_cut = False
        self._most_calls = most_calls
        self._must_call = must_call
        self.n_calls = 0
        self.n_contents = 0
        self.is_silent = True
        self.has_spoken = False
        self.gap = ""
        self.n_malformed = 0
        self.only_known_before: str | None = None
        self._ready: list[Piece] = []

    @property
    def may_call(self) -> bool:
        """Whether what opens a call is still looked at."""
        return self.n_malformed < MAX_MALFORMED_CALLS

    def content(self, text: str) -> None:
        if text and not (self.is_cut and self._must_call):  # what the limit left of a call, or of its mark
            text, self.gap = self.gap + text, ""
            self.n_contents += 1
            self.is_silent = self.is_silent and text.isspace()
            self.has_spoken = self.has_spoken or not self.is_silent
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
        self._check(name)
        self._ready.append(CallStart(self.n_calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        index = self.n_calls - 1
        last = self._ready[-1] if self._ready else None
        if isinstance(last, CallArguments):
            self._ready[-1] = CallArguments(index, last.text + text)
        elif text:
            self._ready.append(CallArguments(index, text))

    def call(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._check(name)
        if self._most_calls is None or self.n_calls < self._most_calls:
            self.start_call(name)
            self.arguments(dump_json(arguments))

    def _check(self, name: str) -> None:
        if self.only_known_before is not None:
            if name not in self.schemas or self.only_known_before in self.source.text[: self.source.at]:
                raise MalformedError
            self.only_known_before = None

    def drop_cut_call(self) -> bool:
        """Leaves out what was to be a call, if the limit cut it off. Whether it did."""
        if self.is_cut:
            self.source.at = len(self.source.text)
            self.source.commit()
        return self.is_cut

    def take(self) -> list[Piece]:
        ready, self._ready = self._ready, []
        return ready
