"""How calls are written, as fixed texts round names and values: for the grammar of calls that must come, for calls of
the past that a template does not know, for an example of a call, and for reading those of a format that is known by
these texts alone, because they were found in what a template writes.

A reader takes the texts loosely: white space may be missing or come between their parts, a number stands for any
number, and what stands in the place of a call's id for any id.

Pure. Does not: know a format (`formats.py`), or find the texts (`prompting/probing.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from localrun.server.parsing.json_calls import MAX_NAME_CHARACTERS, checked_name, parse_json, read_arguments
from localrun.server.parsing.pieces import dump_json
from localrun.server.parsing.source import CallReader, CutShortError, MalformedError, MarkSet, Read, Reading, Source
from localrun.server.parsing.xml_calls import nested

NAME = "NAME"
_T = TypeVar("_T", "Listed", "Written")


@dataclass(frozen=True)
class Listed:
    """Arguments one by one instead of as a JSON object: each is `before value after`, NAME in these being its name,
    with `separator` between two. Texts stand behind `before_text`, if it is not the same, and between two `quote`s,
    bare if that is empty, as JSON if it is None. Any other value is JSON."""

    before: str
    after: str = ""
    separator: str = ""
    quote: str | None = ""
    before_text: str = ""

    def texts_round(self, *, is_text: bool) -> tuple[str, str]:
        """What stands before a value and behind it."""
        before = self.before_text if is_text and self.before_text else self.before
        quote = (self.quote or "") if is_text else ""
        return before + quote, quote + self.after

    def argument(self, name: str, value: Any) -> str:
        is_text = isinstance(value, str) and self.quote is not None
        before, after = self.texts_round(is_text=is_text)
        written = value if is_text else dump_json(value)
        return before.replace(NAME, name) + written + after.replace(NAME, name)


@dataclass(frozen=True)
class Written:
    """Well-formed calls: `opening lead (before arguments after) separator (...) closing`, NAME in `before` being the
    tool's; `arguments` None are a JSON object. A reply that has come to its opening goes on with `lead`. Without
    `separator` there is one call at most. Not `is_sole`: the opening may also be something else's, or models write
    these calls in other ways as well, with other white space, quotes or lists."""

    opening: str
    before: str
    after: str = ""
    lead: str = ""
    separator: str | None = None
    closing: str = ""
    arguments: Listed | None = None
    is_sole: bool = True

    @property
    def triggers(self) -> tuple[str, ...]:
        """From where on a reply can be held to calls; empty where it cannot."""
        return (self.opening,) if self.opening and self.is_sole else ()

    def calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """The calls, as (name, arguments), as the model would write them."""
        if self.separator is None:
            return "\n".join(self._block(call) for call in calls)
        return self._block(*calls)

    def with_texts(self, change: Callable[[str], str]) -> Written:

        def changed(value: Any) -> Any:
            if isinstance(value, str):
                return change(value)
            return _with_texts(value, changed) if isinstance(value, Listed) else value

        return _with_texts(self, changed)

    def _block(self, *calls: tuple[str, Mapping[str, Any]]) -> str:
        made = (self.before.replace(NAME, name) + self._arguments(values) + self.after for name, values in calls)
        return f"{self.opening}{self.lead}{(self.separator or '').join(made)}{self.closing}"

    def _arguments(self, values: Mapping[str, Any]) -> str:
        listed = self.arguments
        if listed is None:
            return dump_json(values)
        return listed.separator.join(listed.argument(name, value) for name, value in values.items())


def _with_texts(made: _T, changed: Callable[[Any], Any]) -> _T:
    return replace(made, **{each.name: changed(getattr(made, each.name)) for each in fields(made)})


# Tags and control tokens, words and numbers, white space, and any other character.
_PART = re.compile(r"<[^<>\s]{1,64}>|[^\W\d_]+|\d+|\s+|.", re.DOTALL)
_ID_CHARACTERS = re.compile(r"[\w.:-]*")
_DIGITS = re.compile(r"\d*")


def parts_of(text: str) -> list[str]:
    """What a text consists of, for comparing it with another."""
    return _PART.findall(text)


def loose_reader(written: Written, *, call_id: str) -> CallReader:
    """A reader of what follows `written.opening`. `call_id` stands for any id in the fixed texts. Raises ValueError for
    texts that do not tell where a name or a value ends."""
    before, behind_name = written.before.split(NAME)
    name_end = _end(behind_name)
    listed = None if written.arguments is None else _Parameter(written.arguments)

    def read_call(reply: Reading) -> Read[None]:
        source = reply.source
        yield from _take(source, before, call_id)
        name, mark = yield from source.until(name_end, limit=MAX_NAME_CHARACTERS)
        source.at -= len(mark)
        name = checked_name(name)
        yield from _take(source, behind_name, call_id)
        if listed is None:
            yield from read_arguments(reply, name)
            yield from _take_what_comes(source, written.after, call_id)
        else:
            ends = (written.after, written.closing)
            arguments = yield from listed.read_all(source, reply.schemas.get(name, {}), ends, call_id)
            if not (yield from _follows(source, written.closing, call_id)):  # the call's own end may be forgotten
                yield from _take(source, written.after, call_id)
            reply.call(name, arguments)

    def read(reply: Reading) -> Read[None]:
        source = reply.source
        yield from _take(source, written.lead, call_id)
        yield from read_call(reply)
        source.commit()
        while written.separator is not None and not (yield from _follows(source, written.closing, call_id)):
            if not (yield from _follows(source, written.separator + before, call_id)):
                break
            yield from _take(source, written.separator, call_id)
            yield from read_call(reply)
            source.commit()
        yield from _take_what_comes(source, written.closing, call_id)

    return read


class _Parameter:
    """Reads arguments that stand one by one."""

    def __init__(self, listed: Listed) -> None:
        self._listed = listed
        self._before, self._behind_key = listed.before.split(NAME)
        behind_text = (listed.before_text or listed.before).split(NAME)[1]
        self._behind_keys = {True: behind_text + (listed.quote or ""), False: self._behind_key}
        self._key_end = _end(self._behind_key)
        if listed.quote is None or not listed.after.strip():
            raise ValueError("nothing tells where a value ends")

    def read_all(
        self, source: Source, parameters: Mapping[str, Any], ends: tuple[str, str], call_id: str
    ) -> Read[dict[str, Any]]:
        """The arguments up to one of `ends`, which is not taken."""
        found: dict[str, Any] = {}
        while not (yield from _any_follows(source, ends, call_id)):
            yield from _take(source, (self._listed.separator if found else "") + self._before, call_id)
            key, mark = yield from source.until(self._key_end, limit=MAX_NAME_CHARACTERS)
            source.at -= len(mark)
            key = key.strip()
            is_text = yield from self._take_behind_key(source, call_id)
            after = self._listed.after.replace(NAME, key)
            if is_text and self._listed.quote:
                value, _ = yield from source.until(MarkSet((self._listed.quote,)))
                found[key] = value
                yield from _take(source, after, call_id)
                continue
            value = yield from self._read_value(source, after.strip(), ends, call_id)
            value = value.removesuffix(after[: len(after) - len(after.lstrip())])
            if self._has_one_form:
                found[key] = nested(value, self._listed.after.rpartition(NAME)[0].strip(), key, parameters)
            else:
                found[key] = value if is_text else parse_json(value)
        return found

    def _read_value(self, source: Source, after: str, ends: tuple[str, str], call_id: str) -> Read[str]:
        """The text before `after`, which is taken: where what may follow does, since a text may be about calls."""
        parts = parts_of(after)
        n_first = next((at for at, part in enumerate(parts, 1) if part.startswith("<") and len(part) > 1), len(parts))
        mark, rest = "".join(parts[:n_first]), "".join(parts[n_first:])
        start, marks = source.at, MarkSet((mark,))
        while mark not in source.missing:
            try:
                yield from source.until(marks)
            except CutShortError:
                source.missing.add(mark)
                raise
            value_end = source.at - len(mark)
            if not (yield from _try(source, rest, call_id)):
                continue
            following = (*ends, self._listed.separator + self._before)
            is_over = not (yield from source.next_character()) or not all(map(str.strip, (ends[0], following[-1])))
            if is_over or (yield from _any_follows(source, following, call_id)):
                return source.text[start:value_end]
        raise CutShortError

    @property
    def _has_one_form(self) -> bool:
        return self._behind_keys[True] == self._behind_keys[False] or bool(self._listed.quote)

    def _take_behind_key(self, source: Source, call_id: str) -> Read[bool]:
        """What stands between a key and its value. Whether the value is a text, by that."""
        for is_text in (True, False):
            if (yield from _try(source, self._behind_keys[is_text], call_id)):
                return is_text
        # Another kind of value than those that the texts were found with: what they have in common stands round it.
        text, other = (parts_of(self._behind_keys[is_text]) for is_text in (True, False))
        same = next((at for at, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), 0)
        end = "".join(other[same + 1 :])
        if self._has_one_form or not end.strip():
            raise MalformedError
        yield from _take(source, "".join(other[:same]), call_id)
        yield from source.until(_end(end), limit=MAX_NAME_CHARACTERS)
        source.at -= len(next(iter(_end(end).marks)))
        yield from _take(source, end, call_id)
        return False


def _end(text: str) -> MarkSet:
    """What a name ends with that stands before `text`. Raises ValueError where nothing tells."""
    first = next((part for part in parts_of(text) if not part.isspace()), "")
    if first:
        return MarkSet((first,))
    if not text:
        raise ValueError("nothing tells where a name ends")
    return MarkSet((text[0], "<"))


def _take(source: Source, text: str, call_id: str) -> Read[None]:
    """Takes a fixed text, loosely. Raises MalformedError where it does not come."""
    parts = parts_of(text.replace(call_id, "\0"))
    while parts:
        part = parts.pop(0)
        if part.isspace():
            if not parts:  # what follows is a value, whose own white space stays
                yield from source.take(part)
            continue
        yield from source.skip_space()
        if part == "\0":
            yield from source.skip(_ID_CHARACTERS)
        elif part.isdigit():
            yield from source.skip(_DIGITS)
        elif not (yield from source.take(part)):
            raise MalformedError


def _try(source: Source, text: str, call_id: str) -> Read[bool]:
    """Takes a fixed text if it comes, and nothing otherwise."""
    at = source.at
    try:
        yield from _take(source, text, call_id)
    except MalformedError:
        source.at = at
        return False
    return True


def _take_what_comes(source: Source, text: str, call_id: str) -> Read[None]:
    """Takes as much of a fixed text as is there: its end may be what ends the reply, which is no text."""
    for part in parts_of(text):
        if not (yield from _try(source, part, call_id)):
            break


def _follows(source: Source, text: str, call_id: str) -> Read[bool]:
    """Whether a fixed text comes next; takes nothing."""
    at = source.at
    comes = bool(text.strip()) and (yield from _try(source, text.rstrip(), call_id))
    source.at = at
    return comes


def _any_follows(source: Source, texts: Sequence[str], call_id: str) -> Read[bool]:
    for text in texts:
        if (yield from _follows(source, text, call_id)):
            return True
    return False
