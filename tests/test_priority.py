"""Stepping back, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import os, sys
from pathlib import Path
from localrun.processes import step_back
step_back(7)
group = Path("/proc/self/autogroup")
print(os.nice(0), group.read_text() if group.exists() else "")
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling groups are Linux's")


def lowered(*, own_session: bool) -> tuple[str, str]:
    """Niceness, and what the kernel says of the group, as `/autogroup-12 nice 7`."""
    ended = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, start_new_session=own_session
    )
    niceness, _, group = ended.stdout.strip().partition(" ")
    return niceness, group


def test_a_session_of_its_own_steps_back_as_a_group():
    niceness, group = lowered(own_session=True)
    assert niceness == "7"
    if Path("/proc/self/autogroup").exists():
        assert group.endswith("nice 7")


def test_the_session_of_others_stays_where_it_is():
    niceness, group = lowered(own_session=False)
    assert niceness == "7"
    assert not group.endswith("nice 7")
