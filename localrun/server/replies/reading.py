"""Reading a reply of content, thinking between tags, and calls behind marks: the shape of nearly every format.

`Layout` says which marks; `read_reply` follows it. Anything that turns out not to be what its mark announced is content
again, from the mark on, and reading goes on right behind the mark.

Pure. Does not: know the insides of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from localrun.server.replies.mark_set import MarkSet, mark_set
from localrun.server.replies.reply import Reply
from localrun.server.replies.source import CutShortError, MalformedError, Read

# A model that opens so many calls without writing one is not calling anything, and every try reads the text again.
MAX_MALFORMED_CALLS = 64

CallReader = Callable[[Reply], Read[None]]


@dataclass(frozen=True)
class Layout:
    """`thinking` are (opening, closing) tags. `calls` are the readers by opening mark. `unmarked` are readers by the
    first character of content that is nothing but calls. `dropped` marks say nothing to a reader: they are left out.
    The calls of `ends_thinking` may come in the middle of it."""

    thinking: tuple[tuple[str, str], ...] = ()
    calls: dict[str, CallReader] = field(default_factory=dict)
    unmarked: tuple[tuple[str, CallReader], ...] = ()
    dropped: frozenset[str] = frozenset()
    ends_thinking: frozenset[str] = frozenset()

    @cached_property
    def closing(self) -> dict[str, str]:
        return dict(self.thinking)

    @cached_property
    def glued(self) -> frozenset[str]:
        """The marks to which white space before them belongs."""
        return frozenset((*self.closing, *self.closing.values(), *self.calls))

    @cached_property
    def content_marks(self) -> MarkSet:
        return mark_set(self.glued | self.dropped)

    @cached_property
    def content_marks_without_calls(self) -> MarkSet:
        return mark_set((self.glued | self.dropped) - frozenset(self.calls))

    def thinking_marks(self, closing: str) -> MarkSet:
        """What may end thinking, or is left out of it."""
        return mark_set(self.dropped | {closing} | self.ends_thinking)


def read_reply(reply: Reply, layout: Layout, *, opened: str | None) -> Read[None]:
    """Reads until the end. `opened` is the thinking tag that the prompt ended with."""
    source = reply.source
    n_malformed = 0
    mark: str | None = None
    if opened is not None:
        mark = yield from _thinking(reply, layout, layout.closing[opened])
    at_start = True
    while True:
        if at_start and mark is None and (yield from _unmarked(reply, layout)):
            at_start = False
        if mark is None:
            marks = layout.content_marks if n_malformed < MAX_MALFORMED_CALLS else layout.content_marks_without_calls
            seen_before = reply.n_contents
            mark = yield from source.stream_until(marks, reply.content, glued=layout.glued)
            at_start = at_start and reply.n_contents == seen_before
        if mark is None:
            return
        if mark in layout.closing:
            mark = yield from _thinking(reply, layout, layout.closing[mark])
        elif mark in layout.calls:
            is_call = yield from _calls(reply, layout.calls[mark])
            n_malformed += not is_call
            at_start = at_start and is_call
            mark = None
        else:
            mark = None


def _thinking(reply: Reply, layout: Layout, closing: str) -> Read[str | None]:
    """Thinking up to its end; the opening mark of a call that ended it, if one did."""
    source = reply.source
    marks = layout.thinking_marks(closing)
    yield from source.skip_space()
    while True:
        mark = yield from source.stream_until(marks, reply.thinking, glued=layout.glued)
        if mark is None:
            return None
        if mark == closing:
            yield from source.skip_space()
            return None
        if mark in layout.calls:
            return mark


def _calls(reply: Reply, read: CallReader) -> Read[bool]:
    """Calls behind a mark, which is taken but not committed. Whether they were calls."""
    source = reply.source
    opening_end, n_commits = source.at, source.n_commits
    try:
        yield from read(reply)
    except MalformedError as error:
        source.at = opening_end if source.n_commits == n_commits else 0
        if isinstance(error, CutShortError):
            source.at = len(source.text)
        reply.content(source.text[: source.at])
        source.commit()
        return False
    source.commit()
    yield from source.skip_space()
    return True


def _unmarked(reply: Reply, layout: Layout) -> Read[bool]:
    """Calls without a mark, if that is what the content begins with."""
    source = reply.source
    if not layout.unmarked:
        return False
    source.commit()
    yield from source.skip_space()
    character = yield from source.next_character()
    for first, read in layout.unmarked:
        if character == first:
            n_commits = source.n_commits
            try:
                yield from read(reply)
            except MalformedError:
                if source.n_commits != n_commits:
                    source.at = 0
                    return True
            else:
                source.commit()
                return True
    source.at = 0
    return False
