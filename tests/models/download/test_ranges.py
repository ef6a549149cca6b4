from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.models.download.journal import Range, RangeSet, split

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda each: Range(each[0], sum(each))))


@given(RANGES, st.integers(0, 90), st.integers(0, 30))
def test_it_is_the_set_of_its_bytes(added: list[Range], start: int, length: int):
    ranges = RangeSet(added)
    there = {byte for each in added for byte in range(*each)}
    listed = list(ranges)
    assert {byte for each in listed for byte in range(*each)} == there
    assert ranges.n_bytes == len(there)
    assert all(before.end < after.start for before, after in pairwise(listed))
    missing = ranges.missing(Range(start, start + length))
    assert [byte for each in missing for byte in range(*each)] == [
        byte for byte in range(start, start + length) if byte not in there
    ]


@given(RANGES, st.integers(1, 7))
def test_split_changes_the_pieces_and_not_the_bytes(ranges: list[Range], part_bytes: int):
    parts = split(ranges, part_bytes)
    assert [byte for each in parts for byte in range(*each)] == [byte for each in ranges for byte in range(*each)]
    assert all(0 < part.size_bytes <= part_bytes for part in parts)


@pytest.mark.parametrize("wrong", [Range(-1, 3), Range(5, 4)])
def test_what_is_no_range_is_refused(wrong: Range):
    with pytest.raises(ValueError, match="is no range"):
        RangeSet().add(wrong)
