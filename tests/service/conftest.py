"""Service managers that are small programs on PATH: they write down what they were asked, and do it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localrun.config import Folders
from localrun.service.manager import ServicePlan

# Answers by the first words of the command line, such as {"status": 1, "stderr": ...}. All else succeeds in silence.
_PROGRAM = """#!{python}
import json, sys
from pathlib import Path
folder = Path({folder!r})
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
answers = json.loads((folder / "answers.json").read_text())
line = " ".join([{name!r}, *sys.argv[1:]])
for start in sorted(answers, key=len, reverse=True):
    if line.startswith(start):
        queue = answers[start]
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        (folder / "answers.json").write_text(json.dumps(answers))
        print(answer.get("stdout", ""), end="")
        print(answer.get("stderr", ""), end="", file=sys.stderr)
        sys.exit(answer.get("status", 0))
"""


class FakeCommands:
    """`answers`: the beginning of a command line -> what it says, in turn; the last one for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "answers.json").write_text("{}")
        (folder / "calls.jsonl").touch()

    def add(self, name: str) -> None:
        path = self.folder / name
        path.write_text(_PROGRAM.format(python=sys.executable, folder=str(self.folder), name=name))
        path.chmod(0o755)

    def answers(self, by_start: dict[str, list[dict[str, object]]]) -> None:
        (self.folder / "answers.json").write_text(json.dumps(by_start))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """PATH holds what the test adds, and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return FakeCommands(folder)


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., ServicePlan]:
    def make(**changes: object) -> ServicePlan:
        values: dict[str, object] = {
            "command": ("/opt/localrun/bin/python", "-P", "-m", "localrun", "serve", "--port", "11500"),
            "environment": {"LOCALRUN_SLOTS": "4"},
            "log": tmp_path / "state" / "service.log",
            "written": (tmp_path / "data", tmp_path / "cache"),
        }
        return ServicePlan(**(values | changes))

    return make


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(*(tmp_path / name for name in ("data", "cache", "config", "state")))
