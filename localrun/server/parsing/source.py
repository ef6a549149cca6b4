"""A reply while it is read: text that is still arriving, the marks to find in it, and the pieces that are ready.

A reader is a generator: it yields where it needs more text, and is resumed when there is more or when there is none to
come. So the code of a format reads from top to bottom, and how the text was cut into parts cannot change what it finds.
Invariant: what a reader takes depends on the text alone, never on where it was cut.
Pure but for call ids, which are random. Does not: know any format or what a mark means.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Thinking, dump_json
from localrun.server.templates.marks import LiteralTree, literal_tree, longest_of

# White space in front of a mark belongs to it, up to so many characters; more of it cannot be waited for.
MAX_GLUED_SPACE = 64


class MarkSet:
    """`find` gives the first mark; `held_from` where the text begins that could still become one."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = frozenset(mark for mark in marks if mark)
        self.longest = max(map(len, self.marks), default=0)
        marks_tree = literal_tree(self.marks)
        self._whole = re.compile(longest_of(marks_tree) if self.marks else "(?!)")
        # Leftmost, so the longest beginning of a mark that the text ends with.
        self._beginning = re.compile(f"(?:{_beginnings(marks_tree)})\\Z" if self.marks else "(?!)")
        self._longer = _longer(sorted(self.marks))

    def find(self, text: str, start: int, *, is_ended: bool) -> re.Match[str] | None:
        """The first mark at or after `start`, the longest there; None while a longer one may still come of it."""
        found = self._whole.search(text, start)
        if found is not None and not is_ended and found.group() in self._longer:
            rest = text[found.start() :]
            if any(longer.startswith(rest) for longer in self._longer[found.group()]):
                return None
        return found

    def held_from(self, text: str, start: int) -> int:
        """Where the end of `text` begins that may turn into a mark, white space before it included."""
        found = self._beginning.search(text, start)
        return self.space_before(text, start, len(text) if found is None else found.start())

    def space_before(self, text: str, start: int, end: int) -> int:
        """Where the white space begins that ends at `end`."""
        least = max(start, end - MAX_GLUED_SPACE)
        return least + len(text[least:end].rstrip())


@lru_cache(maxsize=64)
def mark_set(marks: frozenset[str]) -> MarkSet:
    """The set for these marks, remembered: a vocabulary may have thousands of control tokens."""
    return MarkSet(marks)


def _longer(ordered: Sequence[str]) -> dict[str, list[str]]:
    """Of each mark the longer ones that begin with it; in order they follow it."""
    result: dict[str, list[str]] = {}
    for index, mark in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if not other.startswith(mark):
                break
            result.setdefault(mark, []).append(other)
    return result


def _beginnings(node: LiteralTree) -> str:
    """A pattern for every proper beginning of a mark below `node`, longest first."""
    branches = []
    for character, child in node.items():
        if character:
            rest = _beginnings(child)
            branches.append(re.escape(character) + (f"(?:{rest})?" if rest else ""))
    return "|".join(branches)


T = TypeVar("T")
Read = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """What was read is not what its opening mark announced. Everything since the last `commit` is content."""


class CutShortError(MalformedError):
    """The text ended before what was being read did."""


class Source:
    """`text[at:]` is what came and was not taken. Positions are good until the next `commit`. `missing` is what readers
    looked for up to the end and did not find, so that nobody looks for it again."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self.n_commits = 0
        self.missing: set[object] = set()

    def put(self, text: str) -> None:
        held, self.text = self.text, ""
        held += text  # where it is: a text that has one name is not copied, and a held call may be long
        self.text = held

    def end(self) -> None:
        self.is_ended = True

    def commit(self) -> None:
        """Forget what was taken: nobody will come back to it."""
        self.text = self.text[self.at :]
        self.at = 0
        self.n_commits += 1

    def wait(self) -> Read[bool]:
        """More text; False when there is none to come."""
        if self.is_ended:
            return False
        yield
        return True

    def skip_space(self) -> Read[None]:
        return self.skip(_SPACE)

    def skip(self, characters: re.Pattern[str]) -> Read[None]:
        """Takes any number of characters that a pattern is for."""
        while True:
            found = characters.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            del found  # it has the text, which would be copied whenever some came
            if self.at < len(self.text) or not (yield from self.wait()):
                return

    def next_character(self) -> Read[str]:
        """The next character, not taken; empty at the end."""
        while self.at >= len(self.text):
            if not (yield from self.wait()):
                return ""
        return self.text[self.at]

    def take(self, literal: str) -> Read[bool]:
        """Whether `literal` comes next; it is taken then, and nothing otherwise."""
        while True:
            if self.text.startswith(literal, self.at):
                self.at += len(literal)
                return True
            rest = self.text[self.at : self.at + len(literal)]
            if not literal.startswith(rest) or not (yield from self.wait()):
                return False

    def take_any(self, literals: tuple[str, ...]) -> Read[str | None]:
        """The first of `literals` that comes next; it is taken then. Put longer ones first."""
        for literal in literals:
            if (yield from self.take(literal)):
                return literal
        return None

    def until(self, marks: MarkSet, *, limit: int | None = None) -> Read[tuple[str, str]]:
        """The text up to the first mark, and the mark; both are taken. Raises CutShortError at the end, and
        MalformedError when there is no mark within `limit` characters."""
        start = search_from = self.at
        while True:
            found = marks.find(self.text, search_from, is_ended=self.is_ended)
            length = (len(self.text) if found is None else found.start()) - start
            if limit is not None and length > limit + marks.longest:
                raise MalformedError
            if found is not None:
                if limit is not None and length > limit:
                    raise MalformedError
                self.at = found.end()
                return self.text[start : found.start()], found.group()
            search_from = marks.held_from(self.text, search_from)
            if not (yield from self.wait()):
                raise CutShortError

    def stream_until(self, marks: MarkSet, emit: Callable[[str], None], *, glued: frozenset[str]) -> Read[str | None]:
        """Hand the text before the first mark to `emit` as soon as it is certain, commit it, and take the mark.

        White space before a mark that is among `glued` belongs to the mark. Gives the mark; None at the end.
        """
        while True:
            found = marks.find(self.text, self.at, is_ended=self.is_ended)
            if found is not None:
                mark, begin = found.group(), found.start()
                if mark in glued:
                    begin = marks.space_before(self.text, self.at, begin)
                emit(self.text[self.at : begin])
                self.at = begin
                self.commit()
                self.at = found.end() - begin
                return mark
            certain = marks.held_from(self.text, self.at)
            emit(self.text[self.at : certain])
            self.at = certain
            self.commit()
            if not (yield from self.wait()):
                emit(self.text)
                self.at = len(self.text)
                return None


# A model that opens so many calls without writing one is not calling anything, and every try reads the text again.
MAX_MALFORMED_CALLS = 64


@dataclass(eq=False)
class Reading:
    """One reply being read: what came in, what is known of the tools, and the pieces that are ready.

    `schemas` are the parameters of the tools that may be called, by name. More than `most_calls` are
    left out: the client has said that it takes no more. A reply that `must_call` has no content of its own.
    `is_silent` until there is more content than white space, and again after a call. `gap` is the white space round
    calls that content stood before (`has_spoken`); it comes back if more content follows. While `only_known_before` is
    a text, a call of no known tool is malformed, and one that has this text in it.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    streams: bool
    most_calls: int | None = None
    must_call: bool = False
    source: Source = field(default_factory=Source)
    is_cut: bool = False
    n_calls: int = 0
    n_contents: int = 0
    is_silent: bool = True
    has_spoken: bool = False
    gap: str = ""
    n_malformed: int = 0
    only_known_before: str | None = None
    _ready: list[Piece] = field(default_factory=list)

    @property
    def may_call(self) -> bool:
        """Whether what opens a call is still looked at."""
        return self.n_malformed < MAX_MALFORMED_CALLS

    @property
    def _expects_call(self) -> bool:
        """Whether nothing but a call, or the end of one, is due: content would have begun by now."""
        return self.must_call or (self.n_calls > 0 and self.is_silent)

    def content(self, text: str) -> None:
        if text and not (self.is_cut and self._expects_call):  # what the limit left of a call, or of its mark
            text, self.gap = self.gap + text, ""
            self.n_contents += 1
            self.is_silent = self.is_silent and text.isspace()
            self.has_spoken = self.has_spoken or not self.is_silent
            self._add(Content(text))

    def thinking(self, text: str) -> None:
        if text:
            self._add(Thinking(text))

    def start_call(self, name: str) -> None:
        """Arguments that follow are this call's."""
        self._check(name)
        self._ready.append(CallStart(self.n_calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._add(CallArguments(self.n_calls - 1, text))

    def _add(self, piece: Content | Thinking | CallArguments) -> None:
        """As a part of the last piece, if that is of the same kind."""
        if self._ready and isinstance(last := self._ready[-1], type(piece)):
            self._ready[-1] = msgspec.structs.replace(piece, text=last.text + piece.text)
        else:
            self._ready.append(piece)

    def call(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._check(name)
        if self.most_calls is None or self.n_calls < self.most_calls:
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


# Reads what follows an opening mark.
CallReader = Callable[[Reading], Read[None]]
