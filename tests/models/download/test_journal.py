"""The journal of an unfinished download, and the ranges that it records."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.models.download import journal
from localrun.models.download.journal import Header, Journal, Range, RangeSet, Record, split

HEADER = Header(size_bytes=1000, sha256="a" * 64, validator='"v 1"')
RECORDS = [Record(Range(0, 10), 1), Record(Range(500, 600), 0xFFFFFFFF), Record(Range(10, 20), 7)]


def written(path: Path) -> Path:
    out = Journal.create(path, HEADER)
    out.append(RECORDS[0])
    out.content_reached_the_disk()
    out.append(RECORDS[1])
    out.append(RECORDS[2])
    out.close()
    return path


def test_it_says_what_was_written(tmp_path: Path):
    path = written(tmp_path / "journal")
    assert journal.read(path) == (HEADER, RECORDS, 1, path.stat().st_size)


def test_cut_or_changed_anywhere_it_says_a_true_beginning(tmp_path: Path):
    path = written(tmp_path / "journal")
    text = path.read_bytes()
    for at in range(len(text)):
        for damaged in (text[:at], text[:at] + bytes([text[at] ^ 0x15]) + text[at + 1 :]):
            path.write_bytes(damaged)
            found = journal.read(path)
            if found is not None:
                assert found.header == HEADER
                assert found.records == RECORDS[: len(found.records)]
                assert found.n_synced <= len(found.records)
                assert text.startswith(damaged[: found.n_sound_bytes])


def test_what_stands_behind_a_torn_line_is_not_hidden_by_it(tmp_path: Path):
    path = written(tmp_path / "journal")
    path.write_bytes(path.read_bytes()[:-3])
    found = journal.read(path)
    assert found is not None
    again = Journal.reopen(path, found.n_sound_bytes)
    again.append(Record(Range(30, 40), 3))
    again.close()
    reread = journal.read(path)
    assert reread is not None
    assert reread.records == [*RECORDS[:2], Record(Range(30, 40), 3)]


def test_what_is_no_journal_is_none(tmp_path: Path):
    path = tmp_path / "journal"
    assert journal.read(path) is None
    for text in (b"", b"\n", b"hello\n", b"R 0 10 00000001 12345678\n"):
        path.write_bytes(text)
        assert journal.read(path) is None


def test_a_range_outside_the_file_is_not_believed(tmp_path: Path):
    path = tmp_path / "journal"
    out = Journal.create(path, HEADER)
    out.append(Record(Range(990, 1010), 1))
    out.close()
    found = journal.read(path)
    assert found is not None
    assert found.records == []


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
