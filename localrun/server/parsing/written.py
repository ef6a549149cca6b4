"""How calls are written, as fixed texts round names and values: for the grammar of calls that must come, for calls of
the past that a template does not know, and for an example of a call.

Pure. Does not: read (each format has its own readers), or know a format (`formats.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

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


def dump_json(value: Any) -> str:
    """JSON as clients get it: nothing escaped that need not be, but half a surrogate pair, which no UTF-8 can carry."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
