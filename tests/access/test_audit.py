"""The audit log: one line for each act, bounded."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from localrun.access import books
from localrun.access.books import AuditLog


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
    monkeypatch.setattr(books, "MAX_BYTES", 1000)
    log = AuditLog(tmp_path)
    for number in range(200):
        log.write(who="zed", what=str(number), address="", result="200")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert set(files) - {"audit.jsonl"} == {f"audit.jsonl.{number}" for number in range(1, books.N_OLD + 1)}
    kept = [json.loads(line)["what"] for name in sorted(files, reverse=True) if name != "audit.jsonl"
            for line in (tmp_path / name).read_text().splitlines()]  # fmt: skip
    assert kept == [str(number) for number in range(int(kept[0]), int(kept[-1]) + 1)]
    assert all(path.stat().st_size < 1200 for path in tmp_path.iterdir())


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("no folder")
    AuditLog(tmp_path / "state").write(who="zed", what="x", address="", result="200")
    assert '"who": "zed"' in caplog.text
