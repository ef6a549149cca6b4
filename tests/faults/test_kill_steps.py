"""kill -9 at every step of writing each file of ours: the old state or the new one is read afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.injection import Injected
from tests.faults.kill_steps import CHANGES

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the process that is killed is a fork")


@pytest.mark.parametrize("name", CHANGES)
def test_killed_at_every_step(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.faults.kill_steps", name, str(folder)]
    environ = os.environ | Injected(tmp_path).environment
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 2, "it was killed somewhere"
