"""What is kept of batches: one result for each line, counts that are the results', lists by an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.errors import StorageExceeded
from localrun.server.batches.store import Api, Ending, Kind, Line, Store, StoredFile, Usage, read_results


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "batches.db")
    yield opened
    opened.close()


def values(batch_id: str) -> dict[str, object]:
    return {
        "id": batch_id, "owner": "", "api": Api.OPENAI, "endpoint": "/v1/completions", "input_file_id": "file-1",
        "completion_window": "24h", "status": "in_progress", "ending": "", "created_at": 1.0, "expires_at": 2.0,
    }  # fmt: skip


def lines(n_lines: int) -> list[Line]:
    return [Line(place, place, f"r{place}", "tiny", place, 1) for place in range(1, n_lines + 1)]


def test_of_two_results_of_a_line_the_first_one_stays_and_is_counted_once(store: Store, tmp_path: Path):
    batch = store.add_batch(values("batch_1"), lines(3))
    store.record(batch.seq, 1, Kind.SUCCEEDED, b"first", Usage(n_output=5))
    store.record(batch.seq, 1, Kind.ERRORED, b"second", Usage(n_output=7))
    batch = store.batch("batch_1", "", Api.OPENAI)
    assert (batch.n_succeeded, batch.n_errored, batch.n_output_tokens) == (1, 0, 5)
    assert [line.place for line in store.pending(batch.seq, 0, 10)] == [2, 3]
    store.begin_end(batch.seq, Ending.EXPIRED, 3.0)
    batch = store.begin_end(batch.seq, Ending.EXPIRED, 4.0)  # after a crash
    assert (batch.n_expired, batch.n_succeeded, batch.finalizing_at) == (2, 1, 3.0)
    store.record(batch.seq, 2, Kind.SUCCEEDED, b"too late", Usage())
    found = list(read_results(tmp_path / "batches.db", batch.seq))
    assert [(one.line, one.kind, one.body) for one in found] == [
        (1, Kind.SUCCEEDED, b"first"), (2, Kind.EXPIRED, None), (3, Kind.EXPIRED, None),
    ]  # fmt: skip


def test_what_belongs_to_one_owner_is_not_there_for_others(store: Store):
    store.add_batch(values("batch_1") | {"owner": "me"})
    assert [batch.id for batch in store.batches("me", Api.OPENAI, after="", limit=9).rows] == ["batch_1"]
    assert store.batches("you", Api.OPENAI, after="", limit=9).rows == []
    assert store.batches("me", Api.ANTHROPIC, after="", limit=9).rows == []


def test_pages_are_read_by_an_index(store: Store, tmp_path: Path):
    for number in range(5):
        store.add_batch(values(f"batch_{number}"))
    page = store.batches("", Api.OPENAI, after="batch_3", limit=2)
    assert ([batch.id for batch in page.rows], page.has_more) == (["batch_2", "batch_1"], True)
    db = sqlite3.connect(tmp_path / "batches.db")
    asked = "SELECT * FROM batches WHERE owner = '' AND api = 'openai' AND seq < 4 ORDER BY seq DESC LIMIT 2"
    plan = " ".join(row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {asked}"))
    db.close()
    assert "batches_of_owner" in plan
    assert "TEMP B-TREE" not in plan


def test_a_file_of_the_version_before_is_used_as_it_is(tmp_path: Path):
    store = Store(tmp_path / "old.db")
    store.add_batch(values("batch_old"), lines(2))
    store.close()
    db = sqlite3.connect(tmp_path / "old.db")
    db.execute("ALTER TABLE batches DROP COLUMN blob_bytes")
    db.execute("PRAGMA user_version=1")
    db.commit()
    db.close()
    store = Store(tmp_path / "old.db")
    assert [batch.id for batch in store.open_batches()] == ["batch_old"]
    assert store.stored_bytes("") == 0
    store.close()


def test_stored_bytes_are_those_that_are_there(store: Store):
    def file(name: str, n_bytes: int, expires_at: int | None = None) -> StoredFile:
        return StoredFile(
            id=name, owner="zed", filename="a", purpose="batch", size_bytes=n_bytes, created_at=0, expires_at=expires_at
        )

    store.add_file(file("file-a", 60, expires_at=10), most_bytes=100)
    with pytest.raises(StorageExceeded, match=r"has 60 bytes .* and 41 bytes more; its limit is 100"):
        store.add_file(file("file-b", 41), most_bytes=100)
    store.add_file(file("file-b", 40), most_bytes=100)
    store.add_file(file("file-c", 1000))  # no limit
    assert (store.stored_bytes("zed"), store.stored_bytes("ida")) == (1100, 0)
    assert store.take_expired_files(11.0) == ["file-a"]
    store.delete_file("file-c", "zed")
    assert store.stored_bytes("zed") == 40
    of_anthropic = {"owner": "zed", "api": Api.ANTHROPIC}
    made = store.add_batch(values("msgbatch_1") | of_anthropic | {"blob_bytes": 30}, lines(1), 100)
    store.begin_end(made.seq, Ending.COMPLETED, 5.0)
    store.finish(made.seq, file("results-1", 50), None, 6.0)
    assert store.stored_bytes("zed") == 120
    with pytest.raises(StorageExceeded):
        store.add_batch(values("msgbatch_2") | of_anthropic | {"blob_bytes": 1}, lines(1), 100)
    with pytest.raises(StorageExceeded, match=r"120 bytes of files and batches here; its limit is 100"):
        store.add_batch(values("batch_1") | {"owner": "zed"}, lines(1), 100)
    store.archive(2.0, 7.0)
    assert store.stored_bytes("zed") == 40
