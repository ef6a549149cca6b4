from __future__ import annotations

from pathlib import Path

from localrun.models.download import journal
from localrun.models.download.journal import Header, Journal, Range, Record

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
