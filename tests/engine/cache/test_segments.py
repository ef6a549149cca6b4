"""The tree of saved segments against a plain list of what was added."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.cache import prefix_tree
from localrun.engine.cache.prefix_tree import common_prefix
from localrun.engine.cache.segments import Path, Segment, SegmentTree

NO_ORDER = np.empty(0, np.int32)
# Few letters make shared beginnings likely.
token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def extend(tree: SegmentTree, tokens: list[int]) -> Segment | None:
    """Add what the tree lacks of `tokens`, as the keeper does."""
    path = tree.match(tokens, len(tokens), whole=False)
    if path.n_tokens == len(tokens):
        return None
    parent = path.segments[-1] if path.segments else None
    return tree.add(parent, path.n_tokens, tokens[path.n_tokens :], NO_ORDER, is_whole=False)


def add_whole(tree: SegmentTree, tokens: list[int]) -> Segment:
    return tree.add(None, 0, tokens, NO_ORDER, is_whole=True)


def matched(tree: SegmentTree, tokens: list[int], *, whole: bool = False) -> int:
    return tree.match(tokens, len(tokens), whole=whole).n_tokens


def spelled(path: Path) -> list[int]:
    """The tokens that a path's pieces stand for."""
    return [
        token
        for segment, start, end in path.pieces()
        for token in segment.tokens[start - segment.start :][: end - start]
    ]


def shared(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_what_two_have_in_common_is_there_once_and_a_branch_may_begin_inside_a_segment():
    tree = SegmentTree()
    trunk = extend(tree, [1, 2, 3, 4, 5, 6])
    branch = extend(tree, [1, 2, 3, 9, 9])
    assert trunk is not None
    assert branch is not None
    assert (branch.parent, branch.start, branch.tokens) == (trunk, 3, [9, 9])
    path = tree.match([1, 2, 3, 9, 9, 7], 6, whole=False)
    assert [(segment, *span) for segment, *span in path.pieces()] == [(trunk, 0, 3), (branch, 3, 5)]
    assert matched(tree, [1, 2, 3, 4, 5, 6]) == 6
    tree.check_integrity()


def test_a_match_ends_at_the_limit_and_inside_a_segment():
    tree = SegmentTree()
    extend(tree, [1, 2, 3, 4])
    assert tree.match([1, 2, 3, 4], 3, whole=False).n_tokens == 3
    assert matched(tree, [1, 2, 8]) == 2
    assert matched(tree, [8]) == 0
    assert tree.match([], 0, whole=False) == Path((), 0)


def test_two_that_begin_alike_at_one_place_are_refused():
    tree = SegmentTree()
    tree.add(None, 0, [1, 2], NO_ORDER, is_whole=False)
    with pytest.raises(ValueError, match="at 0"):
        tree.add(None, 0, [1, 3], NO_ORDER, is_whole=False)
    assert len(tree.segments) == 1


def test_whole_segments_lie_beside_each_other_and_match_completely_or_not_at_all():
    tree = SegmentTree()
    short, long = add_whole(tree, [1, 2, 3]), add_whole(tree, [1, 2, 3, 4, 5])
    assert tree.match([1, 2, 3, 4, 5, 6], 6, whole=True).segments == (long,)
    assert tree.match([1, 2, 3, 4, 9], 5, whole=True).segments == (short,)
    assert matched(tree, [1, 2], whole=True) == 0
    with pytest.raises(ValueError, match="at 0"):
        add_whole(tree, [1, 2, 3])
    with pytest.raises(ValueError, match="at 3"):
        tree.add(short, 3, [4], NO_ORDER, is_whole=True)
    tree.check_integrity()
    assert matched(tree, [1, 2, 3, 4, 9]) == 4, "a beginning of one that is not complete"
    assert tree.remove(long) == [long]
    assert matched(tree, [1, 2, 3, 4, 5], whole=True) == 3
    tree.check_integrity()


def test_removing_takes_what_hangs_below_and_leaves_what_is_above():
    tree = SegmentTree()
    trunk = extend(tree, [1, 2, 3])
    branch = extend(tree, [1, 2, 3, 4])
    leaf = extend(tree, [1, 2, 3, 4, 5])
    assert branch is not None
    assert set(tree.remove(branch)) == {branch, leaf}
    assert list(tree.segments.values()) == [trunk]
    assert matched(tree, [1, 2, 3, 4, 5]) == 3
    tree.check_integrity()
    assert extend(tree, [1, 2, 3, 4]) is not None


@pytest.mark.parametrize("whole", [False, True])
def test_a_match_looks_at_no_more_tokens_the_more_is_saved(whole: bool, monkeypatch: pytest.MonkeyPatch):
    tree, rng, prompt = SegmentTree(), Random(1), [1] * 400
    n_compared = 0

    def counting(run: Sequence[int], tokens: Sequence[int], start: int, limit: int) -> int:
        nonlocal n_compared
        n_compared += min(len(run), limit - start)
        return common_prefix(run, tokens, start, limit)

    add_whole(tree, prompt[:300])
    for number in range(2000):
        add_whole(tree, [*prompt[: rng.randrange(300)], 2, number, *[3] * rng.randrange(300)])
    tree.check_integrity()
    monkeypatch.setattr(prefix_tree, "common_prefix", counting)
    assert tree.match(prompt, 400, whole=whole).n_tokens == 300
    assert 0 < n_compared <= 400


@given(st.lists(token_lists, max_size=12), token_lists, st.integers(0, 14))
@settings(max_examples=150)
def test_a_match_is_the_longest_beginning_of_anything_added(added: list[list[int]], tokens: list[int], limit: int):
    tree, limit = SegmentTree(), min(limit, len(tokens))
    for each in added:
        extend(tree, each)
        tree.check_integrity()
    path = tree.match(tokens, limit, whole=False)
    assert path.n_tokens == max((min(limit, shared(each, tokens)) for each in added), default=0)
    assert spelled(path) == tokens[: path.n_tokens]
    assert sum(len(segment.tokens) for segment in tree.segments.values()) == len(
        {tuple(each[:end]) for each in added for end in range(1, len(each) + 1)}
    ), "something is there twice"


@given(st.sets(token_lists.map(tuple), max_size=10), token_lists)
@settings(max_examples=150)
def test_a_whole_match_is_the_longest_complete_one(added: set[tuple[int, ...]], tokens: list[int]):
    tree = SegmentTree()
    for each in added:
        add_whole(tree, list(each))
    tree.check_integrity()
    fitting = [len(each) for each in added if list(each) == tokens[: len(each)]]
    assert matched(tree, tokens, whole=True) == max(fitting, default=0)


@given(st.lists(token_lists, min_size=1, max_size=10), st.data())
@settings(max_examples=100)
def test_removals_leave_a_sound_tree_without_what_went(added: list[list[int]], data: st.DataObject):
    tree = SegmentTree()
    for each in added:
        extend(tree, each)
    while tree.segments:
        victim = data.draw(st.sampled_from(list(tree.segments.values())))
        n_before, gone = len(tree.segments), tree.remove(victim)
        assert victim in gone
        assert len(tree.segments) == n_before - len(gone)
        tree.check_integrity()


def damaged_books(tree: SegmentTree, leaf: Segment) -> None:
    del tree.segments[leaf.key]


def damaged_tokens(tree: SegmentTree, leaf: Segment) -> None:
    leaf.tokens[0] = 7


def damaged_start(tree: SegmentTree, leaf: Segment) -> None:
    assert leaf.parent is not None
    del leaf.parent.children[leaf.start, 9]
    leaf.start = 50
    leaf.parent.children[50, 9] = leaf


def damaged_parent(tree: SegmentTree, leaf: Segment) -> None:
    assert leaf.parent is not None
    leaf.parent.tokens[leaf.start] = 9


@pytest.mark.parametrize("damage", [damaged_books, damaged_tokens, damaged_start, damaged_parent])
def test_the_check_notices_a_tree_that_contradicts_itself(damage):
    tree = SegmentTree()
    extend(tree, [1, 2, 3])
    leaf = extend(tree, [1, 2, 9])
    assert leaf is not None
    tree.check_integrity()
    damage(tree, leaf)
    with pytest.raises(AssertionError):
        tree.check_integrity()
