"""Saved beginnings of prompts as a radix tree of *segments*. Pure.

A segment stands for tokens [start, end) of a path from the root, and for the backend's state bytes of just these
positions (or, with `is_whole`, of everything up to `end`). A child hangs at its parent's position `child.start`, which
may be inside the parent: what two conversations have in common is there once. Segments that are whole cannot be cut and
need no other: each is there from its first token on, and a `PrefixTree` finds those that some tokens begin with.

Invariants: below one parent, at one position, no two segments begin with the same token, so a walk from the root never
has a choice. Matching compares token ids, never hashes, and takes as long as the tokens are many, whatever is saved.

Does not: count bytes or choose what to drop (`kv_store.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import State
from localrun.engine.cache.disk_record import KEY_BYTES, DiskRecord, segment_key
from localrun.engine.cache.prefix_tree import PrefixTree, common_prefix


@dataclass(eq=False)
class Segment:
    """`data` is None while the bytes are on disk alone. `priority` and `used` rank it for eviction, see `KvStore`."""

    parent: Segment | None
    start: int
    tokens: list[int]
    order: NDArray[np.int32]
    is_whole: bool
    key: bytes
    data: State | None = None
    size_bytes: int = 0
    is_on_disk: bool = False
    priority: float = 0.0
    used: int = 0
    children: dict[tuple[int, int], Segment] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def record(self) -> DiskRecord:
        """What the disk tier is told of it."""
        parent_key = self.parent.key if self.parent else b""
        return DiskRecord(self.key, parent_key, self.start, self.tokens, self.order, self.is_whole)

    def below(self) -> Iterator[Segment]:
        """Its children."""
        yield from self.children.values()


@dataclass(frozen=True)
class Path:
    """The longest saved beginning of some tokens: `n_tokens` of them, in `segments` from the root. Of the last segment
    only a part may match, and of every other one only what comes before its successor's start."""

    segments: tuple[Segment, ...]
    n_tokens: int

    def pieces(self) -> Iterator[tuple[Segment, int, int]]:
        """Each segment with the positions [start, end) that the path takes from it."""
        ends = [segment.start for segment in self.segments]
        for segment, end in zip(self.segments, [*ends[1:], self.n_tokens], strict=False):
            yield segment, segment.start, end


class SegmentTree:
    """See the module."""

    def __init__(self) -> None:
        self._root = Segment(None, 0, [], np.empty(0, np.int32), False, b"")
        self._wholes = PrefixTree()  # its holders are the numbers of whole segments
        self.segments: dict[bytes, Segment] = {}

    def match(self, tokens: Sequence[int], limit: int, *, whole: bool) -> Path:
        """The longest saved beginning of `tokens[:limit]`; with `whole` by complete segments alone."""
        if whole:
            complete = self.wholes(tokens, limit)
            return Path((complete[-1],), complete[-1].end) if complete else Path((), 0)
        found: list[Segment] = []
        node, at = self._root, 0
        while at < limit and (child := node.children.get((at, tokens[at]))) is not None:
            found.append(child)
            node, at = child, at + common_prefix(child.tokens, tokens, at, limit)
        begun = self._wholes.match(tokens, limit)
        if begun.holder is not None and begun.n_tokens > at:
            return Path((self._numbered(begun.holder),), begun.n_tokens)
        return Path(tuple(found), at)

    def wholes(self, tokens: Sequence[int], limit: int) -> list[Segment]:
        """The whole segments that `tokens[:limit]` begins with, shortest first."""
        return [self._numbered(number) for number in self._wholes.ends(tokens, limit)]

    def add(
        self, parent: Segment | None, start: int, tokens: list[int], order: NDArray[np.int32], *, is_whole: bool
    ) -> Segment:
        """A new segment below `parent` (None is the root, where all whole ones are). Raises ValueError where another
        one is in its place."""
        key = segment_key(parent.key if parent else b"", start, tokens)
        node, place = parent or self._root, (start, tokens[0])
        if key in self.segments or (node is not self._root if is_whole else place in node.children):
            raise ValueError(f"a segment at {start} is there already")
        segment = Segment(parent, start, tokens, order, is_whole, key)
        if is_whole:
            self._wholes.insert(_number(segment), tokens)
        else:
            node.children[place] = segment
        self.segments[key] = segment
        return segment

    def remove(self, segment: Segment) -> list[Segment]:
        """Take out a segment and everything below it. Returns them all."""
        gone, stack = [], [segment]
        while stack:
            node = stack.pop()
            gone.append(node)
            del self.segments[node.key]
            stack += node.below()
        if segment.is_whole:
            self._wholes.remove(_number(segment))
        else:
            del (segment.parent or self._root).children[segment.start, segment.tokens[0]]
        return gone

    def check_integrity(self) -> None:
        """Raises AssertionError where the tree contradicts itself. O(tree)."""
        self._wholes.check_integrity()
        wholes = [segment for segment in self.segments.values() if segment.is_whole]
        for segment in wholes:
            assert segment.parent is None, "a whole segment below another one"
            assert segment in self.wholes(segment.tokens, segment.end), "a whole segment that nobody finds"
        seen, stack = len(wholes), list(self._root.below())
        while stack:
            node = stack.pop()
            seen += 1
            parent = node.parent or self._root
            assert self.segments.get(node.key) is node, "a segment of the tree that is not in the books"
            assert node.tokens, "an empty segment"
            assert parent.children.get((node.start, node.tokens[0])) is node, "a child under the wrong token"
            assert parent.start <= node.start <= parent.end, "a child beside its parent"
            inside = node.start - parent.start
            is_at_end = inside == len(parent.tokens)
            assert is_at_end or parent.tokens[inside] != node.tokens[0], "a child that repeats its parent"
            stack += node.below()
        assert seen == len(self.segments), "a segment of the books that is not in the tree"

    def _numbered(self, number: int) -> Segment:
        return self.segments[number.to_bytes(KEY_BYTES, "big")]


def _number(segment: Segment) -> int:
    return int.from_bytes(segment.key, "big")
