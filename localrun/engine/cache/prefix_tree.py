"""Which token prefixes lie in KV cells, and in which sequences: a radix tree over token ids. Pure.

A *holder* is a sequence that has the keys and values of a path from the root. Every node stands for a run of tokens and
knows its holders; a node without a holder does not exist. A holder always covers whole nodes, so a match inside a node
splits nothing until somebody wants to hold exactly that part.

Verbs: `match` and `ends` look and change nothing; `insert` adds or lengthens a holder; `remove` forgets one.
Matching compares token ids, never hashes: a hit is a fact.

Does not: know saved states (`segments.py`), decide what to evict, or know what a holder costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_FIRST_SLICE = 64


@dataclass(eq=False)
class _Node:
    tokens: list[int]
    start: int
    parent: _Node | None
    holders: set[int] = field(default_factory=set)
    ends: set[int] = field(default_factory=set)  # the holders that cover nothing beyond this node
    children: dict[int, _Node] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Match:
    """The longest prefix that somebody holds: `n_tokens` of it, by `holder` (None when nothing matches)."""

    n_tokens: int
    holder: int | None


@dataclass(frozen=True)
class Duplicate:
    """Positions [start, end) that an inserted holder has in cells of its own although `holder` has them too."""

    start: int
    end: int
    holder: int


NO_MATCH = Match(0, None)


class PrefixTree:
    """See the module."""

    def __init__(self) -> None:
        self._root = _Node([], 0, None)
        self._leaf: dict[int, _Node] = {}

    def length(self, holder: int) -> int:
        """Tokens that a holder covers; 0 for an unknown one."""
        node = self._leaf.get(holder)
        return node.end if node else 0

    def match(self, tokens: Sequence[int], limit: int, *, among: set[int] | None = None) -> Match:
        """The longest prefix of `tokens[:limit]` with a holder, if given one of `among`."""
        node, best, holder = self._root, 0, None
        while best < limit:
            child = node.children.get(tokens[node.end])
            if child is None:
                break
            holders = child.holders if among is None else child.holders & among
            if not holders:
                break
            shared = common_prefix(child.tokens, tokens, child.start, limit)
            best, holder = child.start + shared, next(iter(holders))
            if shared < len(child.tokens):
                break
            node = child
        return Match(best, holder) if best else NO_MATCH

    def n_held(self, among: set[int]) -> int:
        """Tokens that some of these holders cover, each counted once. O(their part of the tree)."""
        n_tokens, stack = 0, list(self._root.children.values())
        while stack:
            node = stack.pop()
            if not node.holders.isdisjoint(among):
                n_tokens += len(node.tokens)
                stack += node.children.values()
        return n_tokens

    def ends(self, tokens: Sequence[int], limit: int) -> Iterator[int]:
        """The holders all of whose tokens `tokens[:limit]` begins with, shortest first. O(limit)."""
        node = self._root
        while node.end < limit:
            child = node.children.get(tokens[node.end])
            if child is None or common_prefix(child.tokens, tokens, child.start, limit) < len(child.tokens):
                return
            yield from child.ends
            node = child

    def insert(self, holder: int, tokens: Sequence[int]) -> list[Duplicate]:
        """Let `holder` cover `tokens`, which must begin with what it covers already.

        Returns where it duplicates another one. Amortized O(new tokens).
        """
        before = node = self._leaf.get(holder, self._root)
        duplicates: list[Duplicate] = []
        while node.end < len(tokens):
            child = node.children.get(tokens[node.end])
            if child is None:
                node = self._grow(node, holder, tokens)
                break
            shared = common_prefix(child.tokens, tokens, child.start, len(tokens))
            if shared < len(child.tokens):
                child = self._split(child, shared)
            duplicates.append(Duplicate(child.start, child.end, next(iter(child.holders))))
            child.holders.add(holder)
            node = child
        if node is not self._root:
            before.ends.discard(holder)
            node.ends.add(holder)
            self._leaf[holder] = node
        return duplicates

    def remove(self, holder: int) -> None:
        """Forget a holder, if it is known. Nodes that nobody holds any more go with it."""
        node = self._leaf.pop(holder, None)
        if node is not None:
            node.ends.remove(holder)
        while node is not None:
            parent = node.parent
            node.holders.discard(holder)
            if not node.holders and parent is not None:
                del parent.children[node.tokens[0]]
            node = parent

    def tokens(self, holder: int) -> list[int]:
        """The tokens that a holder covers. O(tokens)."""
        parts: list[list[int]] = []
        node = self._leaf.get(holder)
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    def check_integrity(self) -> None:
        """Raises AssertionError where the tree contradicts itself. O(tree)."""
        covered: dict[int, int] = {}
        ends: dict[int, _Node] = {}
        for node in self._nodes():
            parent = node.parent
            assert parent is not None
            assert node.tokens, "empty node"
            assert node.start == parent.end, "a node does not start where its parent ends"
            assert parent.children[node.tokens[0]] is node, "a child under the wrong token"
            assert node.holders, "a node that nobody holds"
            assert parent is self._root or node.holders <= parent.holders, "a holder of a child misses in the parent"
            for holder in node.holders:
                covered[holder] = max(covered.get(holder, 0), node.end)
            ends |= dict.fromkeys(node.ends, node)
        assert ends == self._leaf, "ends differ"
        assert covered == {holder: leaf.end for holder, leaf in self._leaf.items()}, "leaves differ"

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _grow(self, node: _Node, holder: int, tokens: Sequence[int]) -> _Node:
        """Add the tokens after `node`: in place when nobody else could notice, else as a new child."""
        if not node.children and node.holders == {holder} and node is not self._root:
            node.tokens += tokens[node.end :]
            return node
        child = _Node(list(tokens[node.end :]), node.end, node, {holder})
        node.children[child.tokens[0]] = child
        return child

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut `node` after `at` of its tokens. Returns the upper part, which is a new node; leaves stay below."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.tokens[:at], node.start, parent, set(node.holders))
        parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.start += at
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper


def common_prefix(run: Sequence[int], tokens: Sequence[int], start: int, limit: int) -> int:
    """How many tokens of `run` equal those of `tokens` from `start` on, looking no further than `limit`.

    Compares slices, which is one C call, as long as all before them together, and halves on a difference: tens of
    microseconds for thousands of equal tokens, and nothing for the rest.
    """
    length = max(0, min(len(run), limit - start))
    same, different = 0, min(length, _FIRST_SLICE)
    while run[same:different] == tokens[start + same : start + different]:
        if different == length:
            return length
        same, different = different, min(length, 2 * different)
    while different - same > 1:
        middle = (same + different) // 2
        if run[same:middle] == tokens[start + same : start + middle]:
            same = middle
        else:
            different = middle
    return same
