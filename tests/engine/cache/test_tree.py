"""The radix tree against plain dictionaries of what sequences hold and of what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from localrun.engine.cache import tree as tree_module
from localrun.engine.cache.tree import Block, Path, PrefixKey, SharedRange, Tree, block_key, common_prefix
from tests.depth import DEPTH

seqs = st.integers(0, 5)
# Two letters make shared beginnings likely.
token_lists = st.lists(st.integers(0, 1), max_size=10)
salts = st.sampled_from([b"", b"adapter"])


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def match(tree: Tree, tokens: list[int], limit: int | None = None, salt: bytes = b"") -> Path:
    return tree.match(PrefixKey(tokens, salt), len(tokens) if limit is None else limit)


def grow(tree: Tree, seq: int, tokens: list[int]) -> list[SharedRange]:
    return tree.grow(seq, PrefixKey(tokens), len(tokens))


def save(tree: Tree, tokens: list[int], salt: bytes = b"", most: int = 100) -> Block | None:
    """A block of what is not saved yet of `tokens`, or of the first part of it."""
    saved = match(tree, tokens, salt=salt).saved()
    if saved.n_tokens == len(tokens):
        return None
    parent = saved.blocks[-1] if saved.pieces else None
    rest = tokens[saved.n_tokens :][:most]
    if parent is None and block_key(PrefixKey([], salt).root, 0, rest) in tree.blocks:
        return None  # a state: no model has both, and both would be one file
    return tree.graft(parent, saved.n_tokens, rest, root=PrefixKey([], salt).root)


class Trees(RuleBasedStateMachine):
    """`held` is what each sequence covers, `rows` the tokens up to the end of each block, `wholes` those of states."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.held: dict[int, tuple[bytes, list[int]]] = {}
        self.rows: dict[Block, tuple[bytes, list[int]]] = {}
        self.wholes: dict[Block, tuple[bytes, list[int]]] = {}

    @rule(seq=seqs, more=token_lists, salt=salts)
    def grow(self, seq: int, more: list[int], salt: bytes) -> None:
        salt, before = self.held.get(seq, (salt, []))
        tokens = before + more
        same = self.tree.grow(seq, PrefixKey([*tokens, 7], salt), len(tokens))
        others = [held for other, (its_salt, held) in self.held.items() if other != seq and its_salt == salt]
        end = max((shared(tokens, held) for held in others), default=0)
        assert [at for each in same for at in range(each.start, each.end)] == list(range(len(before), end))
        for each in same:
            assert each.seq != seq
            assert shared(tokens, self.held[each.seq][1]) >= each.end
        if tokens:
            self.held[seq] = salt, tokens

    @rule(seq=seqs, n_tokens=st.integers(0, 8))
    def cut(self, seq: int, n_tokens: int) -> None:
        self.tree.cut(seq, n_tokens)
        if seq in self.held:
            salt, tokens = self.held.pop(seq)
            if tokens[:n_tokens]:
                self.held[seq] = salt, tokens[:n_tokens]

    @rule(seq=seqs)
    def leave(self, seq: int) -> None:
        self.tree.leave(seq)
        self.held.pop(seq, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), most=st.integers(1, 5), n_tokens=st.integers(1, 8))
    def attach(self, data: st.DataObject, most: int, n_tokens: int) -> None:
        """Save something that a sequence holds."""
        salt, tokens = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        tokens = tokens[:n_tokens]
        block = save(self.tree, tokens, salt, most)
        if block is not None:
            self.rows[block] = salt, tokens[: block.end]

    @rule(tokens=token_lists, salt=salts, most=st.integers(1, 5))
    def graft(self, tokens: list[int], salt: bytes, most: int) -> None:
        """Find something on disk that nobody holds."""
        block = save(self.tree, tokens, salt, most)
        if block is not None:
            self.rows[block] = salt, tokens[: block.end]

    @rule(tokens=token_lists.filter(len), salt=salts)
    def save_whole(self, tokens: list[int], salt: bytes) -> None:
        if (salt, tokens) in [*self.wholes.values(), *((r, t) for b, (r, t) in self.rows.items() if b.start == 0)]:
            return  # see `save`
        self.wholes[self.tree.graft_state(tokens, root=PrefixKey([], salt).root)] = salt, tokens

    @precondition(lambda self: self.rows or self.wholes)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        blocks = {**self.rows, **self.wholes}
        block = data.draw(st.sampled_from(sorted(blocks, key=lambda each: each.name)))
        gone = self.tree.detach(block)
        assert block in gone
        assert all(each in blocks for each in gone)
        for each in gone:
            self.rows.pop(each, None)
            self.wholes.pop(each, None)
        assert all(each.parent not in gone for each in self.rows)

    @rule(tokens=token_lists, limit=st.integers(0, 12), salt=salts, among=st.none() | st.sets(seqs))
    def match(self, tokens: list[int], limit: int, salt: bytes, among: set[int] | None) -> None:
        limit = min(limit, len(tokens))
        path = self.tree.match(PrefixKey(tokens, salt), limit)
        lengths = {
            seq: min(limit, shared(held, tokens))
            for seq, (its_salt, held) in self.held.items()
            if its_salt == salt and (among is None or seq in among)
        }
        n_held = max(lengths.values(), default=0)
        found = {seq for seq, length in lengths.items() if length == n_held > 0}
        assert path.held(among) == (n_held, found)
        saved = path.saved()
        ends = [shared(rows, tokens) for its_salt, rows in self.rows.values() if its_salt == salt]
        assert saved.n_tokens == min(limit, max(ends, default=0))
        at = 0
        for block, start, end in saved.pieces:
            assert (start, end > start, block.start <= start, end <= block.end) == (at, True, True, True)
            assert block.tokens[start - block.start : end - block.start] == tokens[start:end]
            at = end
        assert at == saved.n_tokens
        whole = [tokens for its_salt, tokens in self.wholes.values() if its_salt == salt]
        lengths_of_states = sorted(len(each) for each in whole if each == tokens[:limit][: len(each)])
        assert [state.end for state in path.states()] == lengths_of_states
        begun = [len(held) for r, held in self.held.values() if r == salt and held == tokens[:limit][: len(held)]]
        n_ended, seq = path.ended(set(self.held))
        assert n_ended == max(begun, default=0)
        assert seq == -1 or self.held[seq][1] == tokens[:n_ended]

    @invariant()
    def is_sound(self) -> None:
        self.tree.check_integrity()
        assert set(self.tree.blocks.values()) == {*self.rows, *self.wholes}
        for seq in range(6):
            assert self.tree.length(seq) == len(self.held.get(seq, (b"", []))[1])
        for block, (salt, tokens) in (*self.rows.items(), *self.wholes.items()):
            assert block.tokens == tokens[block.start :]
            above = block.parent.name if block.parent else PrefixKey([], salt).root
            assert block.name == block_key(above, block.start, block.tokens)
        held = {(salt, tuple(tokens[:end])) for salt, tokens in self.held.values() for end in range(1, len(tokens) + 1)}
        assert self.tree.n_held(self.held.keys()) == len(held)


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=50 * DEPTH, stateful_step_count=40)


def test_what_somebody_else_has_already_is_reported():
    tree = Tree()
    grow(tree, 1, [1, 2, 3, 4])
    assert grow(tree, 2, [1, 2]) == [SharedRange(0, 2, 1)]
    (same,) = grow(tree, 2, [1, 2, 3, 9])
    assert same == SharedRange(2, 3, 1)


def test_what_nobody_needs_any_more_leaves_no_nodes_and_no_cuts_behind():
    tree = Tree()
    tokens = list(range(100))
    trunk = save(tree, tokens)
    for at in range(1, 100):
        grow(tree, at, [*tokens[:at], 777])
    assert tree.n_nodes == 99 + 1 + 99
    for at in range(1, 100):
        tree.leave(at)
        tree.check_integrity()
    assert tree.n_nodes == 1
    assert trunk is not None
    assert tree.detach(trunk) == [trunk]
    assert tree.n_nodes == 0
    tree.check_integrity()


def test_what_two_have_in_common_is_there_once_and_a_branch_may_begin_inside_a_block():
    tree = Tree()
    trunk, branch = save(tree, [1, 2, 3, 4, 5, 6]), save(tree, [1, 2, 3, 9, 9])
    assert trunk is not None
    assert branch is not None
    assert (branch.parent, branch.start, branch.tokens) == (trunk, 3, [9, 9])
    assert match(tree, [1, 2, 3, 9, 9, 7]).saved() == (5, [(trunk, 0, 3), (branch, 3, 5)])
    assert match(tree, [1, 2, 3, 4, 5, 6]).saved() == (6, [(trunk, 0, 6)])
    tree.check_integrity()


def test_a_match_ends_at_the_limit_and_inside_a_block():
    tree = Tree()
    save(tree, [1, 2, 3, 4])
    for tokens, limit, expected in (([1, 2, 3, 4], 3, 3), ([1, 2, 8], 3, 2), ([8], 1, 0), ([], 0, 0)):
        assert match(tree, tokens, limit).saved().n_tokens == expected


def test_a_match_ends_where_an_atom_begins_that_it_does_not_have_as_a_whole():
    tree = Tree()
    tokens = [1, 2, -5, -6, -7, 3]
    grow(tree, 1, tokens[:4])
    save(tree, tokens[:5])
    key = PrefixKey(tokens, atoms=((2, 5),))
    path = tree.match(key, 6)
    assert path.held() == (2, {1})
    assert path.saved().n_tokens == 5
    assert tree.match(key, 4).saved().n_tokens == 2
    assert path.ended({1}) == (0, -1)


def test_an_atom_may_be_longer_than_the_blocks_that_hold_it():
    tree = Tree()
    tokens = [1, 2, -5, -6, -7, -8, 3, 4]
    first = tree.graft(None, 0, tokens[:4])
    second = tree.graft(first, 4, tokens[4:7])
    key = PrefixKey(tokens, atoms=((2, 6),))
    assert tree.match(key, 8).saved() == (7, [(first, 0, 4), (second, 4, 7)])
    for limit in (3, 5):
        assert tree.match(key, limit).saved() == (2, [(first, 0, 2)])


def test_where_to_cut_is_never_inside_an_atom():
    key = PrefixKey([0] * 30, atoms=((4, 20),))
    assert [key.cut_after(0, n) for n in (3, 4, 5, 19, 21)] == [3, 4, 4, 4, 21]
    assert [key.cut_after(4, n) for n in (1, 16, 18)] == [20, 20, 22]


def test_salts_have_nothing_in_common():
    tree = Tree()
    grow(tree, 1, [1, 2, 3])
    save(tree, [1, 2, 3])
    assert match(tree, [1, 2, 3], salt=b"adapter").n_tokens == 0
    block = save(tree, [1, 2, 3], b"adapter")
    assert block is not None
    assert block.record.root == PrefixKey([], b"adapter").root
    assert match(tree, [1, 2, 3], salt=b"adapter").saved().blocks == [block]
    tree.check_integrity()


def test_two_blocks_that_begin_alike_at_one_place_are_refused():
    tree = Tree()
    trunk = tree.graft(None, 0, [1, 2, 3])
    for parent, start, tokens in (
        (None, 0, [1, 3]),
        (trunk, 2, [3, 4]),
        (trunk, 4, [1]),
        (trunk, 0, [1]),
        (None, 1, [1]),
    ):
        with pytest.raises(ValueError, match=f"at {start}"):
            tree.graft(parent, start, tokens)
    tree.graft_state([5])
    with pytest.raises(ValueError, match="of 1 tokens"):
        tree.graft_state([5])
    tree.check_integrity()
    assert len(tree.blocks) == 2


def test_detaching_takes_what_hangs_below_first_and_leaves_what_is_above():
    tree = Tree()
    trunk, branch, leaf = save(tree, [1, 2, 3]), save(tree, [1, 2, 3, 4]), save(tree, [1, 2, 3, 4, 5])
    assert branch is not None
    assert tree.detach(branch) == [leaf, branch]
    assert list(tree.blocks.values()) == [trunk]
    tree.check_integrity()
    assert save(tree, [1, 2, 3, 4]) is not None


def test_states_need_no_other_and_match_completely_or_not_at_all():
    tree = Tree()
    short, long = tree.graft_state([1, 2, 3]), tree.graft_state([1, 2, 3, 4, 5])
    assert match(tree, [1, 2, 3, 4, 5, 6]).states() == [short, long]
    assert match(tree, [1, 2, 3, 4, 9]).states() == [short]
    assert match(tree, [1, 2, 3, 4, 9]).n_tokens == 4, "a beginning of one that is not complete"
    assert match(tree, [1, 2]).states() == []
    assert tree.detach(short) == [short]
    assert match(tree, [1, 2, 3, 4, 5]).states() == [long]
    tree.check_integrity()


def test_a_match_looks_at_no_more_tokens_the_more_is_kept(monkeypatch: pytest.MonkeyPatch):
    tree, rng, prompt = Tree(), Random(1), [1] * 400
    n_compared = 0

    def counting(run: Sequence[int], tokens: Sequence[int], start: int, limit: int) -> int:
        nonlocal n_compared
        n_compared += min(len(run), limit - start)
        return common_prefix(run, tokens, start, limit)

    tree.graft_state(prompt[:300])
    for number in range(2000):
        tree.graft_state([*prompt[: rng.randrange(300)], 2, number, *[3] * rng.randrange(300)])
    tree.check_integrity()
    monkeypatch.setattr(tree_module, "common_prefix", counting)
    assert match(tree, prompt).states()[-1].end == 300
    assert 0 < n_compared <= 400


@given(st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=200), st.integers(0, 250))
def test_the_common_beginning_is_where_a_loop_would_stop(run: list[int], tokens: list[int], limit: int):
    assert common_prefix(run, tokens, 0, min(limit, len(tokens))) == min(limit, shared(run, tokens))
    long = [5] * 1000
    assert common_prefix([*long, *run], [*long, *tokens], 0, 1000 + len(tokens)) == 1000 + shared(run, tokens)


def damaged_books(tree: Tree, leaf: Block) -> None:
    del tree.blocks[leaf.name]


def damaged_tokens(tree: Tree, leaf: Block) -> None:
    leaf.nodes[0].tokens[0] = 7


def damaged_start(tree: Tree, leaf: Block) -> None:
    leaf.nodes[0].start = 50


def damaged_parent(tree: Tree, leaf: Block) -> None:
    leaf.parent = None


def damaged_node(tree: Tree, leaf: Block) -> None:
    leaf.nodes[0].block = None


def damaged_sequence(tree: Tree, leaf: Block) -> None:
    leaf.nodes[0].seqs.add(3)


@pytest.mark.parametrize(
    "damage", [damaged_books, damaged_tokens, damaged_start, damaged_parent, damaged_node, damaged_sequence]
)
def test_the_check_notices_a_tree_that_contradicts_itself(damage):
    tree = Tree()
    save(tree, [1, 2, 3])
    leaf = save(tree, [1, 2, 9])
    grow(tree, 1, [1, 2])
    assert leaf is not None
    tree.check_integrity()
    damage(tree, leaf)
    with pytest.raises(AssertionError):
        tree.check_integrity()
