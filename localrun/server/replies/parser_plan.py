"""Which parser a reply gets: its format, its thinking tags, and the control tokens that come as text.

Pure. Does not: know where these came from (`prepare.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from localrun.server.replies.formats import CallFormat
from localrun.server.replies.pieces import ReplyParser
from localrun.server.replies.reading import Layout, read_reply
from localrun.server.replies.reply import Reply, StreamingParser
from localrun.server.replies.source import Read
from localrun.server.replies.thinking_tags import ThinkingTags

# A longer control token is no tokenizer's, and patterns nest as deep as texts are long.
MAX_TOKEN_CHARS = 128


@dataclass(frozen=True, kw_only=True)
class ParserPlan:
    """`call_format` None reads no calls, `tags` None no thinking. `triggers` are the texts behind which the decoding is
    constrained; with `calls_are_constrained` every call is well-formed. `most_calls` None is any number."""

    call_format: CallFormat | None = None
    tags: ThinkingTags | None = None
    answer_marks: frozenset[str] = frozenset()
    control_tokens: Sequence[str] = ()
    triggers: Sequence[str] = ()
    calls_are_constrained: bool = False
    most_calls: int | None = None

    @cached_property
    def shows_control(self) -> bool:
        """Whether control tokens must come as text: a mark is one of them, or has one in it."""
        marks = [*self.answer_marks]
        if self.call_format is not None:
            marks += (*self.call_format.marks, *self.call_format.own_marks)
        if self.tags is not None:
            marks += (self.tags.opening, self.tags.closing)
        return any(token in mark for token in self.control_tokens if token for mark in marks)

    def warm(self) -> None:
        """Make what the parsers share, which is remembered: with a thousand control tokens it takes 0.1 s, so a thread
        had better do it before the first parser is made."""
        self.parser({}).feed("x")
        for _, closing in self._layout.thinking:
            self._layout.thinking_marks(closing)

    def parser(
        self, schemas: Mapping[str, Mapping[str, Any]], *, opened: str = "", thinking_open: str | None = None
    ) -> ReplyParser:
        """A parser of one reply. `schemas` are the tools' parameters; `opened` is what the prompt has of the reply, and
        `thinking_open` the tag that it ends inside of."""
        whole = None if self.call_format is None else self.call_format.whole

        def read(reply: Reply) -> Read[None]:
            if whole is not None:
                return whole(reply, self._shown)
            return read_reply(reply, self._layout, opened=thinking_open)

        reply = Reply(schemas, streams=self.calls_are_constrained, most_calls=self.most_calls)
        return StreamingParser(reply, read, opened=opened)

    @cached_property
    def _shown(self) -> frozenset[str]:
        if not self.shows_control:
            return frozenset()
        return frozenset(token for token in self.control_tokens if len(token) <= MAX_TOKEN_CHARS)

    @cached_property
    def _layout(self) -> Layout:
        calls = {} if self.call_format is None else self.call_format.marks
        closing = frozenset() if self.tags is None else frozenset((self.tags.closing,))
        return Layout(
            thinking=() if self.tags is None else ((self.tags.opening, self.tags.closing),),
            calls=calls,
            unmarked=() if self.call_format is None else self.call_format.unmarked,
            dropped=self._shown | self.answer_marks | closing,
            ends_thinking=frozenset(mark for mark in calls if mark in self._shown or mark in self.triggers),
        )
