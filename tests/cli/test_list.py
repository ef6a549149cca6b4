"""`localrun list`: columns for people, the daemon's rows for scripts."""

from __future__ import annotations

import json


def test_columns(localrun, daemon):
    ended = localrun("list", port=daemon.port)
    assert ended.returncode == 0, ended.stderr
    header, row = ended.stdout.splitlines()
    assert header.split() == ["NAME", "ID", "SIZE", "QUANT", "PARAMETERS", "CONTEXT", "MODIFIED", "SOURCE", "LOADED"]
    assert row.startswith("tiny  0123456789ab  9.5 MB  ")
    assert "days ago" in row


def test_json(localrun, daemon):
    (row,) = json.loads(localrun("list", "--json", port=daemon.port).stdout)
    assert row["name"] == "tiny"
    assert row["size"] == 9_500_000
