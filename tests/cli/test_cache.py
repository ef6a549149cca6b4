"""`localrun cache`: through the daemon when there is one, and on the disk itself when there is none."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from localrun import kv_folders
from localrun.cli import exits
from localrun.kv_folders import About

SIZE = re.compile(r"[\d.]+ [KM]?B")


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def kv(environment: dict[str, str], tmp_path: Path) -> Path:
    """The folder of saved state with two models, `some`, whose file is there, and `gone`."""
    root = kv_folders.kv_folder(tmp_path / "home" / "cache")
    model = tmp_path / "some.gguf"
    model.touch()
    for digit, name, path in (("1", "some", model), ("2", "gone", tmp_path / "gone.gguf"), ("3", "some", model)):
        folder = root / (digit * 32)
        folder.mkdir(parents=True)
        kv_folders.write_about(folder, About(model=name, model_path=str(path), build="b", created_at_s=0.0))
        (folder / kv_folders.entry_name(digit.encode() * 16)).write_bytes(b"x" * 1500)
    return root


def entries(root: Path) -> list[str]:
    return sorted(folder.path.name[0] for folder in kv_folders.survey(root) if folder.n_entries)


def test_columns_and_limits(localrun, daemon):
    shown = localrun("cache", port=daemon.port)
    header, tiny, other, empty, memory, disk = shown.stdout.splitlines()
    assert header.split() == ["NAME", "KV", "CELLS", "IN", "MEMORY", "ON", "DISK", "LAST", "USED", "HIT", "RATE"]
    assert tiny.split()[:8] == ["tiny", "100/8192", "1.5", "MB", "in", "3", "4.0", "MB"]
    assert tiny.endswith("days ago  50%")
    assert other.split() == ["other", "-", "-", "0", "B", "-", "-"]
    assert empty == ""
    assert "1.5 MB" in memory
    assert all(part in disk for part in ("4.0 MB", "9.0 MB", "/some/kv"))


def test_json_is_what_the_daemon_says(localrun, daemon):
    report = json.loads(localrun("cache", "--json", port=daemon.port).stdout)
    assert report["models"][0]["disk_entries"] == 7
    assert report["disk_limit_bytes"] == 9_000_000


@pytest.mark.parametrize(
    ("arguments", "query"),
    [
        ((), ""),
        (("tiny",), "model=tiny"),
        (("--ram",), "tier=ram"),
        (("tiny", "--disk"), "model=tiny&tier=disk"),
        (("--ram", "--disk"), ""),
    ],
)
def test_clear_asks_the_daemon(localrun, daemon, arguments, query):
    cleared = localrun("cache", "clear", *arguments, port=daemon.port)
    assert SIZE.findall(cleared.stdout) == ["1.5 MB", "4.0 MB"]
    assert [path for path, _ in daemon.bodies] == [f"/localrun/v1/cache?{query}"]


def test_without_a_daemon_the_disk_is_shown(localrun, kv, free_port):
    report = json.loads(localrun("cache", "--json", port=free_port).stdout)
    assert {row["model"]: (row["disk_bytes"], row["disk_entries"]) for row in report["models"]} == {
        "some": (3000, 2),
        "gone": (1500, 1),
    }
    assert report["disk_folder"] == str(kv)


def test_without_a_daemon_clear_empties_the_folders_of_a_model(localrun, kv, free_port):
    cleared = localrun("cache", "clear", "some:latest", "--yes", port=free_port)
    assert SIZE.findall(cleared.stdout) == ["0 B", "3.0 KB"]
    assert entries(kv) == ["2"]
    assert localrun("cache", "clear", "--ram", port=free_port).returncode == exits.OK
    assert entries(kv) == ["2"]
    unknown = localrun("cache", "clear", "unknown", port=free_port)
    assert unknown.returncode == exits.MODEL_NOT_FOUND
    assert "unknown" in unknown.stderr
    assert localrun("cache", "clear", port=free_port).returncode == exits.OK
    assert kv_folders.survey(kv) == []


def test_prune_takes_what_belongs_to_no_model_any_more(localrun, kv, free_port):
    kv_folders.clear(kv / ("3" * 32))
    pruned = localrun("cache", "prune", port=free_port)
    assert SIZE.findall(pruned.stdout) == ["1.5 KB"]
    assert "2 folders" in pruned.stdout
    assert entries(kv) == ["1"]
    assert len(kv_folders.survey(kv)) == 1
