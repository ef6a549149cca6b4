"""Do the tests notice a fault? Puts each of `mutants.toml`, one at a time, into a copy of the tree and runs the tests
that should fail of it: `python packaging/mutants.py [WORDS]`, with words only the rows that have one of them.

Exit status 1 if a fault went unnoticed, 2 if a row fits the tree no more or its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info", "wheels", "dist")
TIMEOUT_S = 900


class Mutant(NamedTuple):
    """`old`, which stands once in `file`, becomes `new`; `tests` are paths below tests/, with spaces between them."""

    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {self.new.strip()}  (was: {self.old.strip()})"

    def text(self, root: Path) -> str:
        """The file with the fault. Raises ValueError for a row that does not fit."""
        before = (root / self.file).read_text(encoding="utf-8")
        if before.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.file} has {before.count(self.old)} times, and should have once: {self.old}")
        return before.replace(self.old, self.new)


def table() -> list[Mutant]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**row) for row in rows]


def first_failure(root: Path, tests: str) -> str:
    """The first of these tests that fails in that tree, or hangs; empty if all pass."""
    paths = [f"tests/{path}" for path in tests.split()]
    environment = os.environ | {"PYTHONPATH": str(root)}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "--exitfirst", "-p", "no:cacheprovider", *paths],
            cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "a test hangs"
    if ended.returncode not in (0, 1):  # no tests, or an error of pytest's own
        sys.exit(f"{tests}: {ended.stdout}{ended.stderr}")
    lines = (line.partition(" - ")[0] for line in ended.stdout.splitlines())
    failures = (line for line in lines if line.startswith(("FAILED ", "ERROR ")))
    return "" if not ended.returncode else next(failures, "no test, but pytest")


def _write(path: Path, text: str, number: int) -> None:
    """With a time that no other version of the file has, by which Python tells whether it has compiled this one."""
    path.write_text(text, encoding="utf-8")
    os.utime(path, (number, number))


def main(words: list[str]) -> int:
    mutants = [one for one in table() if not words or any(word in str(one) for word in words)]
    n_unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=_LEFT_OUT)
        for name in ("models", "tui"):  # which the environment would import from the tree itself
            (root / "localrun" / name).symlink_to(root / name)
        try:
            texts = [one.text(root) for one in mutants]
        except (OSError, ValueError) as error:
            print(error)
            return 2
        for tests in dict.fromkeys(one.tests for one in mutants):
            if failure := first_failure(root, tests):
                print(f"without any fault: {failure}")
                return 2
        for number, (one, text) in enumerate(zip(mutants, texts, strict=True)):
            path = root / one.file
            before = path.read_text(encoding="utf-8")
            _write(path, text, 2 * number)
            failure = first_failure(root, one.tests)
            _write(path, before, 2 * number + 1)
            n_unnoticed += not failure
            print(f"{one}\n    {failure or 'NO TEST NOTICES THIS'}", flush=True)
    print(f"{len(mutants) - n_unnoticed} of {len(mutants)} faults were noticed")
    return 1 if n_unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
