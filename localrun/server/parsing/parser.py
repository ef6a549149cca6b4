"""The parser of every format: reading a reply of content, thinking between tags, and calls behind marks.

`StreamingParser` resumes the format's reader with each new text and hands over what that made of it. `Layout` says
which marks there are; `read_reply` follows it, for nearly every format. Anything that turns out not to be what its mark
announced is content again, from the mark on, and reading goes on right behind the mark.

A call is held until it is whole, so that one that turns out malformed comes back as content, and one that the reply's
limit cut off is left out; where the decoding was constrained to well-formed calls (`streams`), its arguments are handed
on as they come.
Pure. Does not: know any format, or the insides of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from localrun.server.parsing.pieces import Piece, ReplyParser
from localrun.server.parsing.source import (
    CallReader,
    CutShortError,
    MalformedError,
    MarkSet,
    Read,
    Reading,
    Source,
    mark_set,
)
from localrun.server.parsing.written import Written


class StreamingParser:
    """See the module. `opened` is what the prompt already has of the reply: it is read first, and not the model's."""

    def __init__(self, reply: Reading, read: CallReader, *, opened: str = "") -> None:
        self._reply = reply
        self._run: Read[None] | None = read(reply)
        reply.source.put(opened)
        self._resume()

    def feed(self, text: str) -> list[Piece]:
        self._reply.source.put(text)
        self._resume()
        return self._reply.take()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        self._reply.is_cut = is_cut
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


# A longer control token is no tokenizer's, and patterns nest as deep as texts are long.
MAX_TOKEN_CHARS = 128


@dataclass(frozen=True)
class ThinkingTags:
    """Thinking stands between `opening` and `closing`."""

    opening: str
    closing: str

    def is_open(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so leaves thinking open."""
        return prompt_end.rstrip().endswith(self.opening)

    def is_closed(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so says that there was enough thinking."""
        return prompt_end.rstrip().endswith(self.closing)


@dataclass(frozen=True)
class Layout:
    """`calls` are the readers by opening mark. `unmarked` are readers by the first character of content that is nothing
    but calls. `dropped` marks say nothing to a reader: they are left out; those of `answer_texts`, which an answer may
    be about as well, where it begins and ends alone.

    The `tags` count where thinking may stand: before any content, and right behind a call. Within content they are
    text, because answers are also about them; those that are or have control tokens (`has_control_tags`) count at the
    beginning of a line as well. Thinking also ends with a whole call of a known tool, and where an answer begins with
    one of `answer_tokens`."""

    tags: ThinkingTags | None = None
    has_control_tags: bool = False
    calls: dict[str, CallReader] = field(default_factory=dict)
    unmarked: tuple[tuple[str, CallReader], ...] = ()
    dropped: frozenset[str] = frozenset()
    answer_texts: frozenset[str] = frozenset()
    answer_tokens: frozenset[str] = frozenset()

    @cached_property
    def tag_marks(self) -> frozenset[str]:
        return frozenset() if self.tags is None else frozenset((self.tags.opening, self.tags.closing))

    @cached_property
    def glued(self) -> frozenset[str]:
        """The marks to which white space before them belongs."""
        return self.tag_marks | frozenset(self.calls)

    def content_marks(self, *, with_tags: bool, with_calls: bool) -> MarkSet:
        """What may end content, or is left out of it."""
        with_tags = with_tags or self.has_control_tags
        return self._marks(self.tag_marks if with_tags else frozenset(), with_calls=with_calls)

    def thinking_marks(self, tags: ThinkingTags, *, with_calls: bool) -> MarkSet:
        """What may end thinking, or is left out of it."""
        return self._marks(self.dropped & self.tag_marks | {tags.closing}, with_calls=with_calls)

    def _marks(self, tags: frozenset[str], *, with_calls: bool) -> MarkSet:
        known = self._known_marks.get((tags, with_calls))
        if known is None:
            calls = frozenset(self.calls) if with_calls else frozenset()
            known = self._known_marks[tags, with_calls] = mark_set((self.dropped - self.tag_marks) | tags | calls)
        return known

    @cached_property
    def _known_marks(self) -> dict[tuple[frozenset[str], bool], MarkSet]:
        return {}


def read_reply(reply: Reading, layout: Layout, *, is_thinking: bool) -> Read[None]:
    """Reads until the end. `is_thinking` says that the prompt has opened the thinking."""
    source = reply.source
    if is_thinking and layout.tags is not None:
        yield from _thinking(reply, layout, layout.tags)
    at_start = True
    while True:
        if at_start and (yield from _unmarked(reply, layout)):
            at_start = False
        marks = layout.content_marks(with_tags=reply.is_silent, with_calls=reply.may_call)
        seen_before = reply.n_contents
        mark = yield from source.stream_until(marks, reply.content, glued=layout.glued)
        at_start = at_start and reply.n_contents == seen_before
        if mark is None:
            return
        if layout.tags is not None and mark in layout.tag_marks:
            yield from _tag(reply, layout, layout.tags, mark)
        elif mark in layout.calls:
            is_call = yield from _calls(reply, layout.calls[mark])
            at_start = at_start and is_call
        elif mark in layout.answer_texts and not reply.is_silent and not (yield from _ends(source)):
            reply.content(source.text[: source.at])
            source.commit()


def _ends(source: Source) -> Read[bool]:
    """Whether nothing but white space follows. Takes nothing."""
    at = source.at
    yield from source.skip_space()
    is_over = not (yield from source.next_character())
    source.at = at
    return is_over


def _tag(reply: Reading, layout: Layout, tags: ThinkingTags, mark: str) -> Read[None]:
    """A tag, which is taken but not committed, and the thinking that it begins."""
    source = reply.source
    space = source.text[: source.at - len(mark)]
    if not reply.is_silent and not (layout.has_control_tags and "\n" in space):
        reply.content(source.text[: source.at])
        source.commit()
    elif mark == tags.opening:
        yield from _thinking(reply, layout, tags)
    elif reply.is_silent:
        yield from source.skip_space()
    else:
        reply.content(space)


def _thinking(reply: Reading, layout: Layout, tags: ThinkingTags) -> Read[None]:
    """Thinking up to its closing tag, or up to the end of a call."""
    source = reply.source
    yield from source.skip_space()
    while (yield from source.take(tags.opening)):  # a model repeats what the prompt has opened
        yield from source.skip_space()
    while True:
        marks = layout.thinking_marks(tags, with_calls=reply.may_call)
        mark = yield from source.stream_until(marks, reply.thinking, glued=layout.glued)
        if mark is None:
            return
        if mark == tags.closing or mark in layout.answer_tokens:
            yield from source.skip_space()
            return
        if mark in layout.calls and (yield from _calls(reply, layout.calls[mark], within=tags)):
            return


def _calls(reply: Reading, read: CallReader, *, within: ThinkingTags | None = None) -> Read[bool]:
    """Calls behind a mark, which is taken but not committed. Whether they were calls. `within` thinking only those of
    known tools are, which end before the thinking does."""
    source = reply.source
    opening_end, n_commits = source.at, source.n_commits
    opening = source.text[:opening_end]
    space = opening[: len(opening) - len(opening.lstrip())]
    reply.only_known_before = None if within is None else within.closing
    try:
        yield from read(reply)
    except MalformedError as error:
        reply.only_known_before = None
        if reply.drop_cut_call():
            return True
        reply.n_malformed += 1
        has_call = source.n_commits != n_commits
        source.at = 0 if has_call else opening_end
        if within is not None and not has_call:
            reply.thinking(source.text[: source.at])
        else:
            if isinstance(error, CutShortError):
                source.at = len(source.text)
            reply.content(source.text[: source.at])
        source.commit()
        return has_call and within is not None
    reply.only_known_before = None
    source.commit()
    yield from source.skip_space()
    reply.is_silent = True
    if reply.has_spoken:
        reply.gap = source.text[: source.at] or space or reply.gap
    return True


def _unmarked(reply: Reading, layout: Layout) -> Read[bool]:
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
                names_tool = any(f'"{name}"' in source.text or f"{name}(" in source.text for name in reply.schemas)
                if (names_tool or source.n_commits != n_commits) and reply.drop_cut_call():
                    return True
                if source.n_commits != n_commits:
                    source.at = 0
                    return True
            else:
                source.commit()
                return True
    source.at = 0
    return False


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    `marks` are the readers by opening mark, `unmarked` those by the first character of content that is nothing but
    calls. `whole` reads the whole reply in place of `read_reply`; it knows `own_marks`. Where a header says what
    follows it, `answers` are those of an answer, the first as one writes it, and `thoughts` is that of thinking.
    """

    name: str
    written: Written
    marks: dict[str, CallReader] = field(default_factory=dict)
    unmarked: tuple[tuple[str, CallReader], ...] = ()
    whole: Callable[[Reading, frozenset[str]], Read[None]] | None = None
    own_marks: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    thoughts: str = ""


@dataclass(frozen=True, kw_only=True)
class ParserPlan:
    """`call_format` None reads no calls, `tags` None no thinking. With `calls_are_constrained` every call is
    well-formed. `most_calls` None is any number. A reply that `must_call` is nothing but thinking and calls."""

    call_format: CallFormat | None = None
    tags: ThinkingTags | None = None
    answer_marks: frozenset[str] = frozenset()
    control_tokens: Sequence[str] = ()
    calls_are_constrained: bool = False
    most_calls: int | None = None
    must_call: bool = False

    @cached_property
    def shows_control(self) -> bool:
        """Whether control tokens must come as text: a mark is one of them, or has one in it."""
        marks = [*self.answer_marks]
        if self.call_format is not None:
            marks += (*self.call_format.marks, *self.call_format.own_marks)
        if self.tags is not None:
            marks += (self.tags.opening, self.tags.closing)
        return any(map(self._has_control, marks))

    def warm(self) -> None:
        """Make what the parsers share, which is remembered: with a thousand control tokens it takes 0.1 s, so a thread
        had better do it before the first parser is made."""
        self.parser({}).feed("x")
        self._layout.content_marks(with_tags=False, with_calls=True)
        if self.tags is not None:
            self._layout.thinking_marks(self.tags, with_calls=True)

    def parser(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        opened: str = "",
        is_thinking: bool = False,
        has_content: bool = False,
    ) -> ReplyParser:
        """A parser of one reply. `schemas` are the tools' parameters. `opened` is what the prompt has of the reply for
        the parser to read; `is_thinking` says that the prompt ends inside of thinking, `has_content` inside of
        content."""
        whole = None if self.call_format is None else self.call_format.whole

        def read(reply: Reading) -> Read[None]:
            if whole is not None:
                return whole(reply, self._shown)
            return read_reply(reply, self._layout, is_thinking=is_thinking)

        reply = Reading(
            schemas, streams=self.calls_are_constrained, most_calls=self.most_calls, must_call=self.must_call
        )
        reply.is_silent = not has_content
        return StreamingParser(reply, read, opened=opened)

    def _has_control(self, mark: str) -> bool:
        return any(token in mark for token in self.control_tokens if token)

    @cached_property
    def _shown(self) -> frozenset[str]:
        if not self.shows_control:
            return frozenset()
        return frozenset(token for token in self.control_tokens if len(token) <= MAX_TOKEN_CHARS)

    @cached_property
    def _layout(self) -> Layout:
        calls = {} if self.call_format is None else self.call_format.marks
        tags = () if self.tags is None else (self.tags.opening, self.tags.closing)
        return Layout(
            tags=self.tags,
            has_control_tags=any(map(self._has_control, tags)),
            calls=calls,
            unmarked=() if self.call_format is None else self.call_format.unmarked,
            dropped=self._shown | self.answer_marks,
            answer_texts=frozenset(mark for mark in self.answer_marks if not self._has_control(mark)),
            answer_tokens=frozenset(filter(self._has_control, self.answer_marks)),
        )
