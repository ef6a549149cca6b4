"""Files that are their owner's alone: whole or not at all, and one who changes them at a time."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrun import config, private_file
from localrun.access import certificate
from localrun.access.keys import KeyFile
from localrun.access.trust import Endpoint, TrustedHosts
from localrun.errors import Conflict
from localrun.tools.permissions import Permissions, Rule

N_EACH = 20
PATIENCE_S = 60.0


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limits")
def test_a_file_that_cannot_be_written_is_named_and_stays(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "file"
    private_file.replace(path, b"one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(path))):
            private_file.replace(path, b"two" * 10)
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
            private_file.replace(path, content)
            assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (content, 0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, _noting(name, getattr(os, name), calls))
    private_file.replace(tmp_path / "file", b"new")
    assert calls == ["fsync", "replace"]


def _noting(name: str, call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        calls.append(name)
        return call(*arguments)

    return noted


def test_what_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    private_file.replace(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        private_file.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_who_waits_too_long_is_told_for_what(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with private_file.locked(path), pytest.raises(TimeoutError, match=r"keys\.json for 0 s; try again"):  # noqa: SIM117
        with private_file.locked(path, timeout_s=0):
            raise AssertionError
    with private_file.locked(path, timeout_s=0):
        pass


def test_a_key_file_that_somebody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(tmp_path)
    at_once = functools.partial(private_file.locked, timeout_s=0)
    monkeypatch.setattr(private_file, "locked", at_once)
    with private_file.locked(file.path), pytest.raises(Conflict, match="try again"):
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
        list(pool.map(lambda where: TrustedHosts(config.folders()).trust(where, shown), hosts))
    assert set(TrustedHosts().all()) == {where.name for where in hosts}
