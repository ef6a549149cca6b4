"""Files appear whole or not at all; small ones are their owner's alone, and one changes them at a time."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrun import stored
from localrun.access import certificate
from localrun.access.keys import KeyFile
from localrun.access.trust import Endpoint, TrustedHosts
from localrun.config import ConfigError
from localrun.errors import Conflict
from localrun.tools.toolbox import Permissions, Rule

N_EACH = 20
PATIENCE_S = 60.0


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limits")
def test_a_file_that_cannot_be_written_is_named_and_stays(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "file"
    stored.replace(path, b"one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(path))):
            stored.replace(path, b"two" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="has no modes")
def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    before = os.umask(0)
    try:
        for content in (b"one", b"two"):
            stored.replace(path, content)
            assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (content, 0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, _noting(name, getattr(os, name), calls))
    stored.replace(tmp_path / "file", b"new")
    assert calls[:2] == ["fsync", "replace"]


def _noting(name: str, call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        calls.append(name)
        return call(*arguments)

    return noted


def test_what_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    stored.replace(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        stored.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_who_waits_too_long_is_told_for_what(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with stored.locked(path), pytest.raises(TimeoutError, match=r"keys\.json for 0 s; try again"):  # noqa: SIM117
        with stored.locked(path, timeout_s=0):
            raise AssertionError
    with stored.locked(path, timeout_s=0):
        pass


def test_a_key_file_that_somebody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(tmp_path)
    at_once = functools.partial(stored.locked, timeout_s=0)
    monkeypatch.setattr(stored, "locked", at_once)
    with stored.locked(file.path), pytest.raises(Conflict, match="try again"):
        file.create("zed")


def allow(path: Path, who: str, begin: Any) -> None:
    permissions = Permissions(path)
    begin.wait(PATIENCE_S)
    for number in range(N_EACH):
        permissions.store(who, str(number), "fingerprint", Rule.ALWAYS)


def test_two_windows_that_allow_tools_at_once_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "permissions.json"
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(2)
    windows = [context.Process(target=allow, args=(path, who, begin)) for who in ("one", "other")]
    for window in windows:
        window.start()
    for window in windows:
        window.join(PATIENCE_S)
        assert window.exitcode == 0
    kept = Permissions(path)
    for who in ("one", "other"):
        assert [kept.rule(who, str(number), "fingerprint") for number in range(N_EACH)] == [Rule.ALWAYS] * N_EACH


def test_machines_that_are_trusted_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    shown = certificate.kept(tmp_path, {"studio"}).certificate.read_text()
    hosts = [Endpoint("studio", port, is_remote=True) for port in range(1, N_EACH + 1)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda where: TrustedHosts().trust(where, shown), hosts))
    assert set(TrustedHosts().all()) == {where.name for where in hosts}


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with stored.replacing(path) as file:
        file.write(b"one")
        assert not path.exists()

    def fail() -> None:
        with stored.replacing(path) as file:
            file.write(b"two")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]


def test_only_what_a_dead_writer_left_is_stale(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = tmp_path / f".{dead.stdout.strip()}-{'0' * 16}.localrun-temp"
    forgotten = tmp_path / f".{os.getpid()}-{'1' * 16}.localrun-temp"
    for path in (left, forgotten, tmp_path / "file", tmp_path / ".1-2.localrun-temp"):
        path.touch()
    with stored.temporary(tmp_path) as writing:
        writing.touch()
        assert set(stored.stale(tmp_path)) == {left, forgotten}
    assert stored.stale(tmp_path / "nowhere") == ()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
@pytest.mark.parametrize("is_fifo", [True, False])
def test_files_that_never_end_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fifo: bool) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    folder = tmp_path / "data"
    folder.mkdir()
    own = certificate.kept(tmp_path / "own", ["localhost"])
    for name in ("keys.json", "hosts.json", "key.pem"):
        if is_fifo:
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero")
    reads = {
        "keys.json": KeyFile(folder).read,
        "hosts.json": TrustedHosts().all,
        "key.pem": lambda: certificate.context(own._replace(key=folder / "key.pem")),
    }
    for name, read in reads.items():
        with pytest.raises(ConfigError, match=f"{re.escape(str(folder / name))}.*not a regular file"):
            read()
