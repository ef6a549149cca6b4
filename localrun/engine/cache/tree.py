"""Which tokens are where: one radix tree for the sequences in cells and for their saved bytes. Pure.

A *node* stands for a run of tokens. It knows the sequences that have these tokens in their cells, the *block* of saved
rows that they are part of, and the whole state that was saved at its end. A node exists as long as it has one of these
or a child. It splits where two paths diverge and where a block, a state or a sequence ends, and is joined again when
nothing diverges there any more. Bytes are never split.

Blocks form chains: everything before a saved block is saved too, so it can be restored from position 0. A branch may
begin inside the block above it. Whole states need no other block.

Matching compares tokens, never hashes, so a hit is certain. Its time depends on the number of tokens, not on how much
is kept.
Does not: count bytes or cells, or choose what to evict (`tiers.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from localrun.engine.backend import State

# Of what names a block.
KEY_BYTES = 16
_FIRST_SLICE = 64


class PrefixKey(NamedTuple):
    """Identifies a prompt: equal keys mean equal states. Token lists begin at position 0.

    `salt` is what else a state depends on, such as a set of adapters, or who may know of it. `atoms` are ranges
    [start, end), in order, that are reused as a whole or not at all: for example an image, whose rows are tokens made
    of its hash.
    """

    tokens: list[int]
    salt: bytes = b""
    atoms: tuple[tuple[int, int], ...] = ()

    @property
    def root(self) -> bytes:
        """The salt's name in the place of a parent block's name; empty for the empty salt."""
        if not self.salt:
            return b""
        return hashlib.blake2b(self.salt, digest_size=KEY_BYTES, person=b"localrun realm").digest()

    def floor(self, n_tokens: int) -> int:
        """The largest length up to `n_tokens` that does not end inside an atom."""
        return next((start for start, end in self.atoms if start < n_tokens < end), n_tokens)

    def cut_after(self, start: int, n_tokens: int) -> int:
        """Where to cut up to `n_tokens` off that begin at `start`, which is in no atom; more of them if they begin with
        a longer atom."""
        end = self.floor(start + n_tokens)
        return end if end > start else next(end for first, end in self.atoms if first == start)


@dataclass(frozen=True, eq=False)
class DiskRecord:
    """A saved block for the disk: the tokens [start, start + len(tokens)) of a path from a root. Its key names it and
    its place under its parent; a name is no proof, so whoever finds a record by its key compares parent, start and
    tokens. `parent_key` is empty below a root; `root` then names the root unless it is the usual one.
    `is_whole`: the bytes are the state of the whole path, not only of [start, end)."""

    key: bytes
    parent_key: bytes
    start: int
    tokens: list[int]
    is_whole: bool
    root: bytes = b""


@dataclass(eq=False, slots=True)
class Node:
    """Tokens from position `start` on. `ends` are those of `seqs` that end here. A root has no tokens."""

    tokens: list[int]
    start: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    seqs: set[int] = field(default_factory=set)
    ends: set[int] = field(default_factory=set)
    block: Block | None = None
    state: Block | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(eq=False, slots=True)
class Block:
    """Saved bytes: the rows of positions [start, end), or with `is_state` the state of everything up to `end`.

    `root` names its salt, `name` is its key on disk. `nodes` is the chain of nodes that it covers, or for a state the
    node at whose end it is. The other fields belong to `Tiers`: `data` is None while the bytes are only on disk,
    `n_below` counts its children in memory, `n_starts` the requests that started from a state.
    """

    parent: Block | None
    root: bytes
    start: int
    end: int
    is_state: bool
    name: bytes
    nodes: list[Node]
    children: set[Block] = field(default_factory=set)
    data: State | None = None
    n_bytes: int = 0
    is_on_disk: bool = False
    n_below: int = 0
    n_starts: int = 0
    rank: tuple[float, int] = (0.0, 0)

    @property
    def n_tokens(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> list[int]:
        """O(tokens)."""
        nodes = list(self.nodes)
        while self.is_state and nodes[0].parent is not None:
            nodes.insert(0, nodes[0].parent)
        return [token for node in nodes for token in node.tokens]

    @property
    def record(self) -> DiskRecord:
        """The block as the disk tier sees it."""
        parent, root = (self.parent.name, b"") if self.parent else (b"", self.root)
        return DiskRecord(self.name, parent, self.start, self.tokens, self.is_state, root)


class SharedRange(NamedTuple):
    """Positions [start, end) that a sequence has in its own cells although `seq` has the same tokens."""

    start: int
    end: int
    seq: int


class SavedPrefix(NamedTuple):
    """Saved rows of a prefix: each block with the positions [start, end) that are taken from it."""

    n_tokens: int
    pieces: list[tuple[Block, int, int]]

    @property
    def blocks(self) -> list[Block]:
        return [block for block, _, _ in self.pieces]


@dataclass(frozen=True)
class Path:
    """The nodes of a key's first `n_tokens`; of the last node, perhaps only a part. Use it before the tree changes."""

    key: PrefixKey
    nodes: list[Node]
    n_tokens: int

    def saved(self) -> SavedPrefix:
        """The saved rows on the path."""
        pieces: list[tuple[Block, int, int]] = []
        n_tokens = 0
        for node in self.nodes:
            if (block := node.block) is None:
                break
            start = pieces.pop()[1] if pieces and pieces[-1][0] is block else node.start
            n_tokens = min(node.end, self.n_tokens)
            pieces.append((block, start, n_tokens))
        n_whole = self.key.floor(n_tokens)
        if n_whole < n_tokens:
            pieces = [(block, start, min(end, n_whole)) for block, start, end in pieces if start < n_whole]
        return SavedPrefix(n_whole, pieces)

    def states(self) -> list[Block]:
        """The whole states on the path, shortest first."""
        return [node.state for node in self.nodes if node.state and self._is_whole(node)]

    def held(self, among: Set[int] | None = None) -> tuple[int, set[int]]:
        """The most tokens that any sequence (of `among`) has in its cells, and the sequences that have so many."""
        n_tokens, seqs = 0, set[int]()
        for node in self.nodes:
            here = node.seqs if among is None else node.seqs & among
            if not here:
                break
            n_tokens, seqs = self.key.floor(min(node.end, self.n_tokens)), here
        return n_tokens, set(seqs)

    def ended(self, among: Set[int]) -> tuple[int, int]:
        """The longest sequence of `among` that is a prefix of the path, as (tokens, sequence); (0, -1) if there is
        none."""
        ends = [(node.end, max(node.ends & among)) for node in self.nodes if self._is_whole(node) and node.ends & among]
        return ends[-1] if ends else (0, -1)

    def _is_whole(self, node: Node) -> bool:
        return node.end <= self.n_tokens and self.key.floor(node.end) == node.end


class Tree:
    """See the module. `blocks` are by name."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self._roots: dict[bytes, Node] = {}
        self._leaves: dict[int, Node] = {}

    def length(self, seq: int) -> int:
        """Tokens that a sequence covers; 0 for an unknown one."""
        leaf = self._leaves.get(seq)
        return leaf.end if leaf else 0

    def match(self, key: PrefixKey, limit: int) -> Path:
        """What is known of `key.tokens[:limit]`."""
        node, at, nodes = self._roots.get(key.root), 0, []
        while node and at == node.end < limit and (node := node.children.get(key.tokens[at])):
            nodes.append(node)
            at += common_prefix(node.tokens, key.tokens, at, limit)
        return Path(key, nodes, at)

    def n_held(self, seqs: Set[int]) -> int:
        """Tokens that these sequences cover together, shared ones counted once. O(their nodes)."""
        seen: set[Node] = set()
        for seq in seqs:
            node = self._leaves.get(seq)
            while node is not None and node not in seen:
                seen.add(node)
                node = node.parent
        return sum(len(node.tokens) for node in seen)

    # --- sequences -----------------------------------------------------------------------------------------------

    def grow(self, seq: int, key: PrefixKey, n_tokens: int) -> list[SharedRange]:
        """Let a sequence cover the first `n_tokens` of a key, which begin with what it covers already. Returns where
        other sequences have the same tokens. Amortized O(new tokens)."""
        node = before = self._leaves.get(seq) or self._root(key.root)
        same: list[SharedRange] = []
        while node.end < n_tokens:
            child = node.children.get(key.tokens[node.end])
            if child is None:
                node = self._extend(node, seq, key.tokens[node.end : n_tokens])
                break
            n_common = common_prefix(child.tokens, key.tokens, node.end, n_tokens)
            node = child if n_common == len(child.tokens) else self._split(child, n_common)
            if node.seqs:
                same.append(SharedRange(node.start, node.end, next(iter(node.seqs))))
            node.seqs.add(seq)
        if node.parent is None:
            self._tidy(node)
            return same
        before.ends.discard(seq)
        node.ends.add(seq)
        self._leaves[seq] = node
        if before is not node:
            self._tidy(before)
        return same

    def cut(self, seq: int, n_tokens: int) -> None:
        """Cut a sequence to its first `n_tokens`."""
        node = self._leaves.get(seq)
        if node is None or node.end <= n_tokens:
            return
        node.ends.remove(seq)
        while node.parent is not None and node.start >= n_tokens:
            parent = node.parent
            node.seqs.remove(seq)
            self._tidy(node)
            node = parent
        if node.end > n_tokens:
            node = self._split(node, n_tokens - node.start)
            (lower,) = node.children.values()
            lower.seqs.remove(seq)
            node.ends.add(seq)
            self._tidy(lower)
        if node.parent is None:
            del self._leaves[seq]
            self._tidy(node)
        else:
            node.ends.add(seq)
            self._leaves[seq] = node

    def leave(self, seq: int) -> None:
        """Forget a sequence, if it is known."""
        self.cut(seq, 0)

    # --- blocks --------------------------------------------------------------------------------------------------

    def graft(self, parent: Block | None, start: int, tokens: Sequence[int], *, root: bytes = b"") -> Block:
        """Add a block of `tokens` at `start`, which is a position inside `parent` or its end (0 without one). Raises
        ValueError if saved rows there begin with the same token. `root` is `PrefixKey.root`. O(tokens)."""
        if not (parent.start < start <= parent.end if parent else start == 0):
            raise ValueError(f"no block can begin at {start}")
        name = block_key(parent.name if parent else root, start, tokens)
        node = self._root(root) if parent is None else next(node for node in parent.nodes if node.end >= start)
        inside = start - node.start
        if node.end == start:
            ahead = node.children.get(tokens[0])
        else:
            ahead = node if node.tokens[inside] == tokens[0] else None
        if name in self.blocks or (ahead is not None and ahead.block is not None):
            raise ValueError(f"a block at {start} is there already")
        if node.end > start:
            node = self._split(node, inside)
        nodes = self._descend(node, tokens)
        block = Block(parent, parent.root if parent else root, start, start + len(tokens), False, name, nodes)
        for each in nodes:
            each.block = block
        if parent is not None:
            parent.children.add(block)
        self.blocks[name] = block
        return block

    def graft_state(self, tokens: Sequence[int], *, root: bytes = b"") -> Block:
        """Add a whole state after `tokens`. Raises ValueError if there is one already. O(tokens)."""
        name = block_key(root, 0, tokens)
        if name in self.blocks:
            raise ValueError(f"a state of {len(tokens)} tokens is there already")
        node = self._descend(self._root(root), tokens)[-1]
        block = node.state = self.blocks[name] = Block(None, root, 0, len(tokens), True, name, [node])
        return block

    def detach(self, block: Block) -> list[Block]:
        """Remove a block and all blocks below it. Returns them, children before parents."""
        gone, stack = [], [block]
        while stack:
            each = stack.pop()
            gone.append(each)
            stack += each.children
        if block.parent is not None:
            block.parent.children.remove(block)
        gone.reverse()
        for each in gone:
            del self.blocks[each.name]
            for node in reversed(list(each.nodes)):
                if each.is_state:
                    node.state = None
                else:
                    node.block = None
                self._tidy_up(node)
        return gone

    # --- the whole -----------------------------------------------------------------------------------------------

    @property
    def n_nodes(self) -> int:
        """O(tree)."""
        return sum(1 for root in self._roots.values() for _ in _below(root))

    def check_integrity(self) -> None:
        """Raises AssertionError if the tree contradicts itself. O(tree)."""
        covered: dict[int, int] = {}
        ends: dict[int, Node] = {}
        chains: dict[bytes, list[Node]] = {}
        for name, root in self._roots.items():
            assert root.children, "a root with nothing below it"
            for node in _below(root):
                self._check_node(node, is_first=node.parent is root)
                for seq in node.seqs:
                    covered[seq] = max(covered.get(seq, 0), node.end)
                for seq in node.ends:
                    ends[seq] = node
                for block in (node.block, node.state):
                    if block is not None:
                        assert block.root == name, "a block of another salt"
                        chains.setdefault(block.name, []).append(node)
        assert ends == self._leaves, "ends differ"
        assert covered == {seq: leaf.end for seq, leaf in self._leaves.items()}, "leaves differ"
        assert chains == {name: block.nodes for name, block in self.blocks.items()}, "blocks differ from their nodes"
        for block in self.blocks.values():
            first, last = block.nodes[0], block.nodes[-1]
            assert last.end == block.end, "a block does not end with its last node"
            assert block.is_state or first.start == block.start, "a block does not begin with its first node"
            above = None if block.is_state or first.parent is None else first.parent.block
            assert block.parent is above, "a block hangs below another one than its tokens"
            assert above is None or block in above.children, "a block that what carries it does not know"
            assert all(child.parent is block for child in block.children), "a block carries another one's"

    def _check_node(self, node: Node, *, is_first: bool) -> None:
        parent = node.parent
        assert parent is not None
        assert node.tokens, "an empty node"
        assert node.start == parent.end, "a node does not start where its parent ends"
        assert parent.children.get(node.tokens[0]) is node, "a child under the wrong token"
        assert node.seqs or node.block or node.state or node.children, "a node that nobody needs"
        assert is_first or node.seqs <= parent.seqs, "a sequence of a child misses in the parent"
        assert node.ends <= node.seqs, "a sequence ends where it is not"
        assert is_first or node.block is None or parent.block is not None, "saved rows below others that are not"

    def _root(self, root: bytes) -> Node:
        return self._roots.setdefault(root, Node([], 0, None))

    def _extend(self, node: Node, seq: int, tokens: Sequence[int]) -> Node:
        """Extend a sequence after `node`: in the node itself if nothing else depends on it, otherwise in a new
        child."""
        if node.parent and node.seqs == {seq} and not (node.children or node.block or node.state):
            node.tokens += tokens
            return node
        child = Node(list(tokens), node.end, node, seqs={seq})
        node.children[child.tokens[0]] = child
        return child

    def _descend(self, node: Node, tokens: Sequence[int]) -> list[Node]:
        """The nodes of `tokens` after `node`. Missing ones are created, and one is split where the tokens end."""
        nodes, at = [], 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = node.children[tokens[at]] = Node(list(tokens[at:]), node.end, node)
            n_common = common_prefix(child.tokens, tokens, at, len(tokens))
            node = child if n_common == len(child.tokens) else self._split(child, n_common)
            nodes.append(node)
            at += n_common
        return nodes

    def _split(self, node: Node, at: int) -> Node:
        """Split a node after `at` of its tokens. Returns the upper part, which is new; ends and state stay with the
        lower."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:at], node.start, parent, seqs=set(node.seqs), block=node.block)
        parent.children[upper.tokens[0]] = upper
        if node.block is not None:
            node.block.nodes.insert(node.block.nodes.index(node), upper)
        node.tokens = node.tokens[at:]
        node.start += at
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def _tidy_up(self, node: Node) -> None:
        """Tidy a node, and its ancestors as long as that removes something."""
        while node.parent is not None:
            parent = node.parent
            if not self._tidy(node):
                return
            node = parent
        self._tidy(node)

    def _tidy(self, node: Node) -> bool:
        """Remove an unneeded node, or join it with its only child if nothing diverges there. Whether it is gone."""
        parent = node.parent
        if parent is None:
            if not node.children:
                self._roots = {name: root for name, root in self._roots.items() if root is not node}
            return not node.children
        if not node.children:
            if node.seqs or node.block or node.state:
                return False
            del parent.children[node.tokens[0]]
            return True
        child = next(iter(node.children.values()))
        if len(node.children) > 1 or node.ends or node.state or child.block is not node.block:
            return False
        child.tokens = node.tokens + child.tokens
        child.start, child.parent = node.start, parent
        parent.children[child.tokens[0]] = child
        if node.block is not None:
            node.block.nodes.remove(node)
        return True


def _below(root: Node) -> Iterator[Node]:
    """All nodes below, parents first."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def common_prefix(run: Sequence[int], tokens: Sequence[int], start: int, limit: int) -> int:
    """How many tokens of `run` equal those of `tokens` from `start` on, looking no further than `limit`.

    Compares slices, each in one C call and as long as all before it together, and bisects at a difference. That takes
    tens of microseconds for thousands of equal tokens, and nothing for the rest.
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


def block_key(parent_key: bytes, start: int, tokens: Sequence[int]) -> bytes:
    """16 bytes that name the block of `tokens` at position `start` below `parent_key` (the root's name at a root)."""
    digest = hashlib.blake2b(parent_key, digest_size=KEY_BYTES, person=b"localrun segment")
    digest.update(start.to_bytes(8, "little"))
    digest.update(np.asarray(tokens, np.int32).astype("<i4", copy=False).tobytes())
    return digest.digest()
