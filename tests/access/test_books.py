"""What is written of use: sums, levels, and that nothing is lost; and the audit log, one bounded line for each act."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from localrun.access import books
from localrun.access.books import AuditLog, Total, UsageFile, UsageRecord, day_of
from localrun.access.quotas import BucketLevel

NOW_S = 1_764_000_000.0


def test_sums_by_key_day_and_model(tmp_path: Path) -> None:
    file = UsageFile(tmp_path)
    assert file.totals("key") == []
    for day in range(2):
        for key, model in (("zed", "a"), ("zed", "b"), ("cli", "a")):
            file.write("id", [], UsageRecord(key, model, 1, 10, 4, 3), NOW_S + day * 86400)
    assert file.totals("key") == [Total("cli", 2, 20, 8, 6), Total("zed", 4, 40, 16, 12)]
    assert file.totals("model", key="zed") == [Total("a", 2, 20, 8, 6), Total("b", 2, 20, 8, 6)]
    assert [total.name for total in file.totals("day")] == [day_of(NOW_S), day_of(NOW_S + 86400)]
    assert file.totals("key", since_day=day_of(NOW_S + 86400), key="cli") == [Total("cli", 1, 10, 4, 3)]
    file.close()


def test_a_file_that_cannot_be_opened_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "usage.db").symlink_to("usage.db")
    with pytest.raises(sqlite3.OperationalError):
        UsageFile(tmp_path).totals("key")


def test_levels_are_those_of_the_last_write(tmp_path: Path) -> None:
    file = UsageFile(tmp_path)
    assert file.levels("id") == []
    for level in (5.0, -3.5):
        file.write("id", [BucketLevel("requests", 60.0, level, NOW_S)], None, NOW_S)
    file.write("other", [BucketLevel("requests", 60.0, 1.0, NOW_S)], None, NOW_S)
    file.close()
    with closing(UsageFile(tmp_path)) as again:
        assert again.levels("id") == [BucketLevel("requests", 60.0, -3.5, NOW_S)]


@pytest.mark.skipif(sys.platform == "win32", reason="has no modes")
def test_all_its_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(UsageFile(tmp_path)) as file:
            file.write("id", [], UsageRecord("zed", "a", 1, 1, 0, 1), NOW_S)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("usage.db", "usage.db-wal", "usage.db-shm"), 0o600)


def test_what_cannot_be_written_now_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(UsageFile(tmp_path)) as file:
        file.write("id", [], UsageRecord("zed", "a", 1, 1, 0, 1), NOW_S)
        with closing(sqlite3.connect(tmp_path / "usage.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(3):
                file.write(
                    "id", [BucketLevel("requests", 60.0, 7.0, NOW_S)], UsageRecord("zed", "a", 1, 1, 0, 1), NOW_S
                )
            assert file.totals("key") == [Total("zed", 1, 1, 0, 1)]
            other.execute("ROLLBACK")
        assert len(caplog.records) == 1  # said once
        file.write("id", [], None, NOW_S)
        assert file.totals("key") == [Total("zed", 4, 4, 0, 4)]
        assert [level.level for level in file.levels("id")] == [7.0]


def test_a_checkpoint_keeps_everything(tmp_path: Path) -> None:
    with closing(UsageFile(tmp_path)) as file:
        file.checkpoint()  # nothing is there
        file.write("id", [], UsageRecord("zed", "a", 1, 1, 0, 1), NOW_S)
        file.checkpoint()
        file.write("id", [], UsageRecord("zed", "a", 1, 1, 0, 1), NOW_S)
        assert file.totals("key") == [Total("zed", 2, 2, 0, 2)]


_WRITER = """
import sys
from pathlib import Path
from localrun.access import books
from localrun.access.quotas import BucketLevel
from localrun.access.books import UsageFile, UsageRecord
file = UsageFile(Path(sys.argv[1]))
for number in range(1, 1_000_000):
    file.write("id", [BucketLevel("requests", 60.0, -float(number), 1.0)], UsageRecord("zed", "a", 1, 2, 1, 3), 1.0)
    print(number, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_whatever_was_said_to_be_written_outlives_a_kill_and_counts_once(tmp_path: Path) -> None:
    n_before = 0
    for n_lines in (1, 50, 137):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(n_lines):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        n_said = n_lines + len(writer.stdout.read().splitlines())
        writer.wait()
        writer.stdout.close()
        with closing(UsageFile(tmp_path)) as file:
            [total] = file.totals("key")
            [level] = file.levels("id")
        # The one that it was at when it was killed may be there, whole.
        n_written = total.requests - n_before
        assert n_written in (n_said, n_said + 1)
        assert (total.prompt_tokens, total.cached_tokens, total.output_tokens) == (
            2 * total.requests, total.requests, 3 * total.requests
        )  # fmt: skip
        assert level.level == -float(n_written)
        n_before = total.requests


# --- the audit log ---


def test_a_line_says_who_what_from_where_and_how_it_went(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "state")
    log.write(who="zed", what='DELETE /api/delete\n{"who": "x"}', address="192.168.1.7", result="200")
    [line] = log.path.read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("time").startswith("20")
    assert entry == {
        "who": "zed", "what": 'DELETE /api/delete\n{"who": "x"}', "from": "192.168.1.7", "result": "200"
    }  # fmt: skip
    if sys.platform != "win32":
        assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "MAX_AUDIT_BYTES", 1000)
    log = AuditLog(tmp_path)
    for number in range(200):
        log.write(who="zed", what=str(number), address="", result="200")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert set(files) - {"audit.jsonl"} == {f"audit.jsonl.{number}" for number in range(1, books.N_OLD_AUDITS + 1)}
    kept = [json.loads(line)["what"] for name in sorted(files, reverse=True) if name != "audit.jsonl"
            for line in (tmp_path / name).read_text().splitlines()]  # fmt: skip
    assert kept == [str(number) for number in range(int(kept[0]), int(kept[-1]) + 1)]
    assert all(path.stat().st_size < 1200 for path in tmp_path.iterdir())


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("no folder")
    AuditLog(tmp_path / "state").write(who="zed", what="x", address="", result="200")
    assert '"who": "zed"' in caplog.text
