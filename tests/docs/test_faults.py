"""The page on faults: each has a row, and the test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "faults" / "README.md"
N_FAULTS = 46


def test_every_fault_has_one_row_and_every_row_a_test_of_its_number():
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, N_FAULTS + 1))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "faults").glob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))
    named = [(number, name) for number, tests in rows for name in re.findall(r"`(test_\w+)`", tests)]
    assert [name for _, name in named if name not in there] == []
    assert {name for name in there if name.startswith("test_fault_")} <= {name for _, name in named}
    for number, _ in rows:
        own = f"test_fault_{int(number):02}_"
        assert any(name.startswith(own) for row, name in named if row == number), number
