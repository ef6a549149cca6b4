"""Finding one of many literal marks in text that is still arriving.

Pure. Built once per set of marks and shared. Does not: know what a mark means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from localrun.server.templates import literals

# White space in front of a mark belongs to it, up to so many characters; more of it cannot be waited for.
MAX_GLUED_SPACE = 64


class MarkSet:
    """`find` gives the first mark; `held_from` where the text begins that could still become one."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = frozenset(mark for mark in marks if mark)
        self.longest = max(map(len, self.marks), default=0)
        marks_tree = literals.tree(self.marks)
        self._whole = re.compile(literals.alternatives(marks_tree) if self.marks else "(?!)")
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


def _beginnings(node: literals.Tree) -> str:
    """A pattern for every proper beginning of a mark below `node`, longest first."""
    branches = []
    for character, child in node.items():
        if character:
            rest = _beginnings(child)
            branches.append(re.escape(character) + (f"(?:{rest})?" if rest else ""))
    return "|".join(branches)
