"""What is written from the program says what the program says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from localrun import config
from localrun.cli.root import COMMANDS, GROUPS
from tests.packaging.machine import PACKAGING, ROOT

sys.path.insert(0, str(PACKAGING))
import generate

DOCS = ROOT / "localrun" / "docs"


@pytest.mark.parametrize("name", sorted(generate.FILES.keys() - {"constraints"}))
def test_the_committed_file_is_what_the_program_says(name: str):
    command = [sys.executable, "packaging/generate.py", "--check", name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_setting_is_on_its_page():
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\S+)", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(config.FIELDS)
    assert {row[0]: row[1] for row in rows}["ram_cache_bytes"] == "LOCALRUN_RAM_CACHE"
    assert {row[0]: row[2] for row in rows}["slots"] == "`8`"


def test_every_variable_of_the_program_is_on_the_page():
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for folder in ("localrun", "models", "tui")
             for path in (ROOT / folder).rglob("*.py")]  # fmt: skip
    used = {name for text in texts for name in re.findall(r"LOCALRUN_[A-Z_]*[A-Z]\b", text)}
    used -= {"LOCALRUN_COMPLETE"}  # belongs to click
    assert used <= set(re.findall(r"LOCALRUN_[A-Z_]*", page))


def test_every_command_is_on_both_pages():
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    manual = (PACKAGING / "localrun.1").read_text(encoding="utf-8")
    for name in COMMANDS.keys() - GROUPS[""].keys():
        assert f"## localrun {name}\n" in page
        assert f'.SS "localrun {name}' in manual


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_manual_page_is_sound_roff():
    command = ["groff", "-man", "-Tutf8", "-ww", "-z", str(PACKAGING / "localrun.1")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert ran.stderr == ""
