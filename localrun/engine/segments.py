"""Saved beginnings of prompts as a radix tree of *segments*. Pure.

A segment stands for tokens [start, end) of a path from the root, and for the backend's state bytes of just these
positions (or, with `is_whole`, of everything up to `end`). A child hangs at its parent's position `child.start`, which
may be inside the parent: what two conversations have in common is there once.

Invariants: below one parent, at one position, no two segments that can be cut begin with the same token, so a walk from
the root never has a choice. Segments that are whole cannot be cut, so there several may begin alike, and only a
complete one matches. Matching compares token ids, never hashes.

Does not: count bytes or choose what to drop (`kv_store.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import State
from localrun.engine.disk_record import DiskRecord, segment_key
from localrun.engine.prefix_tree import common_prefix


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
    children: dict[tuple[int, int], list[Segment]] = field(default_factory=dict)

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
        for siblings in self.children.values():
            yield from siblings


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
        self.segments: dict[bytes, Segment] = {}

    def match(self, tokens: Sequence[int], limit: int, *, whole: bool) -> Path:
        """The longest saved beginning of `tokens[:limit]`; with `whole` by complete segments alone."""
        found: list[Segment] = []
        node, at = self._root, 0
        while at < limit:
            longest, best = 0, None
            for child in node.children.get((at, tokens[at]), ()):
                shared = common_prefix(child.tokens, tokens, at, limit)
                if shared > longest and not (whole and shared < len(child.tokens)):
                    longest, best = shared, child
            if best is None:
                break
            found.append(best)
            node, at = best, at + longest
        return Path(tuple(found), at)

    def add(
        self, parent: Segment | None, start: int, tokens: list[int], order: NDArray[np.int32], *, is_whole: bool
    ) -> Segment:
        """A new segment below `parent` (None is the root). Raises ValueError where another one is in its place."""
        key = segment_key(parent.key if parent else b"", start, tokens)
        node = parent or self._root
        siblings = node.children.setdefault((start, tokens[0]), [])
        if key in self.segments or (siblings and not is_whole):
            raise ValueError(f"a segment at {start} is there already")
        segment = Segment(parent, start, tokens, order, is_whole, key)
        siblings.append(segment)
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
        node, place = segment.parent or self._root, (segment.start, segment.tokens[0])
        node.children[place].remove(segment)
        if not node.children[place]:
            del node.children[place]
        return gone

    def check_integrity(self) -> None:
        """Raises AssertionError where the tree contradicts itself. O(tree)."""
        seen, stack = 0, list(self._root.below())
        while stack:
            node = stack.pop()
            seen += 1
            parent = node.parent or self._root
            assert self.segments.get(node.key) is node, "a segment of the tree that is not in the books"
            assert node.tokens, "an empty segment"
            assert node in parent.children.get((node.start, node.tokens[0]), ()), "a child under the wrong token"
            assert parent.start <= node.start <= parent.end, "a child beside its parent"
            if not node.is_whole:
                assert len(parent.children[node.start, node.tokens[0]]) == 1, "two segments that begin alike"
                inside = node.start - parent.start
                is_at_end = inside == len(parent.tokens)
                assert is_at_end or parent.tokens[inside] != node.tokens[0], "a child that repeats its parent"
            stack += node.below()
        assert seen == len(self.segments), "a segment of the books that is not in the tree"
