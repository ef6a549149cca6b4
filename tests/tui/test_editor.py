from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from localrun.tui.editor import edited


def _script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_editors_text_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VISUAL", f"{_script(tmp_path / 'ed', 'echo more >> $2')} --flag")
    assert edited("first\n", tmp_path) == "first\nmore"


def test_an_editor_that_fails_or_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VISUAL", _script(tmp_path / "ed", "exit 3"))
    with pytest.raises(subprocess.CalledProcessError):
        edited("x", tmp_path)
    monkeypatch.setenv("VISUAL", str(tmp_path / "nothing"))
    with pytest.raises(OSError, match="No such file"):
        edited("x", tmp_path)
