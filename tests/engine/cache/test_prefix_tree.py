"""The radix tree against a plain dictionary of token lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from localrun.engine.cache.prefix_tree import NO_MATCH, Duplicate, Match, PrefixTree, common_prefix

holders = st.integers(0, 5)
# Two letters make shared beginnings likely.
token_lists = st.lists(st.integers(0, 1), max_size=10)


def shared_length(one: list[int], other: list[int]) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


class Tree(RuleBasedStateMachine):
    """`held[holder]` is what each holder covers."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.held: dict[int, list[int]] = {}

    @rule(holder=holders, more=token_lists)
    def insert(self, holder: int, more: list[int]) -> None:
        before = self.held.get(holder, [])
        tokens = before + more
        duplicates = self.tree.insert(holder, tokens)
        others = [covered for other, covered in self.held.items() if other != holder]
        end = max((shared_length(tokens, covered) for covered in others), default=0)
        doubled = [position for copy in duplicates for position in range(copy.start, copy.end)]
        assert doubled == list(range(len(before), end))
        for copy in duplicates:
            assert copy.holder != holder
            assert shared_length(tokens, self.held[copy.holder]) >= copy.end
        if tokens:
            self.held[holder] = tokens

    @rule(holder=holders)
    def remove(self, holder: int) -> None:
        self.tree.remove(holder)
        self.held.pop(holder, None)

    @rule(tokens=token_lists, limit=st.integers(0, 12), among=st.none() | st.sets(holders))
    def match(self, tokens: list[int], limit: int, among: set[int] | None) -> None:
        limit = min(limit, len(tokens))
        candidates = {
            holder: min(limit, shared_length(tokens, covered))
            for holder, covered in self.held.items()
            if among is None or holder in among
        }
        longest = max(candidates.values(), default=0)
        found = self.tree.match(tokens, limit, among=among)
        assert found.n_tokens == longest
        assert found == NO_MATCH if longest == 0 else candidates[found.holder] == longest

    @rule(tokens=token_lists, limit=st.integers(0, 12))
    def ends(self, tokens: list[int], limit: int) -> None:
        limit = min(limit, len(tokens))
        found = list(self.tree.ends(tokens, limit))
        begun = {holder for holder, covered in self.held.items() if covered == tokens[:limit][: len(covered)]}
        assert set(found) == begun
        assert len(found) == len(begun)
        lengths = [len(self.held[holder]) for holder in found]
        assert lengths == sorted(lengths)

    @invariant()
    def agrees(self) -> None:
        self.tree.check_integrity()
        for holder in range(6):
            assert self.tree.length(holder) == len(self.held.get(holder, []))
            assert self.tree.tokens(holder) == self.held.get(holder, [])


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


@given(token_lists, token_lists, st.integers(0, 4), st.integers(0, 12))
@settings(max_examples=200)
def test_a_common_prefix_is_as_long_as_token_by_token(run: list[int], tokens: list[int], start: int, limit: int):
    limit = min(limit, len(tokens))
    start = min(start, limit)
    assert common_prefix(run, tokens, start, limit) == shared_length(run, tokens[start:limit])


def test_a_match_inside_a_node_splits_nothing_until_somebody_wants_to_hold_it():
    tree = PrefixTree()
    tree.insert(1, [1, 2, 3, 4])
    assert tree.match([1, 2, 9], 3) == Match(2, 1)
    assert tree.insert(2, [1, 2, 9]) == [Duplicate(0, 2, 1)]
    assert tree.match([1, 2, 3, 4], 4) == Match(4, 1)
    assert tree.match([1, 2, 9], 3) == Match(3, 2)


def test_the_check_notices_a_tree_that_contradicts_itself():
    tree = PrefixTree()
    tree.insert(1, [1, 2, 3])
    tree.insert(2, [1, 2, 4])
    tree.check_integrity()
    next(tree._nodes()).holders.discard(2)
    with pytest.raises(AssertionError):
        tree.check_integrity()
