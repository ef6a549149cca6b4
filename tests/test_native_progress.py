"""What is shown while llama.cpp compiles, of pip's output as it was recorded, and where nothing can be compiled."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import pytest

from localrun.native_build import wheels
from localrun.native_build.machine import Machine
from localrun.native_build.plan import VERSION, Plan
from localrun.native_build.wheels import BuildError, Progress, compile_wheel, install
from tests.says import says

ROOT = Path(__file__).parents[1]
OUTPUT = """\
Collecting llama-cpp-python
  -- Performing Test CMAKE_HAVE_LIBC_PTHREAD
  [1/2] a test of the compiler
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_with_the_percentage_and_the_time_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    progress = Progress(terminal, 0.0)
    for line in OUTPUT.splitlines():
        progress.see(line, 1.0)
    progress.see("  [1/131] /usr/bin/gcc -DGGML_BUILD", 60.0)
    progress.see("  [54/131] /usr/bin/g++", 180.0)
    shown = terminal.getvalue().split("\r\x1b[2K")
    assert "\n" not in terminal.getvalue()
    assert shown[1:] == [
        "fetching llama.cpp and what builds it",
        "compiling llama.cpp: 0 %",
        "compiling llama.cpp: 41 % (about 3 minutes left)",
    ]


def built(folder: Path, program: str) -> None:
    script = folder / "pip.py"
    script.write_text(f"import sys\nsys.stdout.write({OUTPUT!r})\n{program}\n", encoding="utf-8")
    # The arguments that pip gets are this program's, which does not look at them.
    compile_wheel({}, folder, [sys.executable, str(script)], log=folder / "build.log")


def test_without_a_terminal_there_is_a_line_now_and_then(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "llama_cpp_python.whl").touch()
    built(tmp_path, "for n in range(1, 132): print(f'  [{n}/131] /usr/bin/g++ ' + 'x' * 500)")
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("compiling")] == [
        f"compiling llama.cpp: {percent} %" for percent in range(10, 101, 10)
    ]
    assert len(lines) == 13
    assert not (tmp_path / "build.log").exists()


def test_a_build_that_fails_names_its_log_and_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    noise = "".join(f"print('noise {n}')\n" for n in range(20))
    with pytest.raises(BuildError) as raised:
        built(tmp_path, f"print('  a.cpp:1: fatal error: vector: No such file')\n{noise}sys.exit(1)")
    assert says(raised.value, "build.log", "--wheels")
    assert "noise 3" in (tmp_path / "build.log").read_text(encoding="utf-8")
    printed = capfd.readouterr().err
    assert says(printed, "fatal error: vector", "noise 19")
    assert "noise 3" not in printed


def test_where_nothing_can_be_compiled_pips_own_wheel_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = Plan(backend="cpu", inputs={})
    plan.problems.append("no C++ compiler was found")
    monkeypatch.setattr(wheels, "make_plan", lambda *_, **__: plan)
    there: dict[str, object] = {}
    asked: list[str] = []
    monkeypatch.setattr(wheels, "installed", lambda _: there)
    monkeypatch.setattr(wheels, "wheel_from", lambda where, _: asked.append(where) or bool(there))
    here = Machine({"HOME": str(tmp_path), "LOCALRUN_HOME": str(tmp_path)}, "Linux", "x86_64")
    with pytest.raises(BuildError, match="compiler"):
        install(here, "", "", sys.executable, force=False)
    there["version"] = "an older one"
    install(here, "", "", sys.executable, force=False)
    assert asked == ["", ""]
    there["version"] = VERSION
    install(here, "", "", sys.executable, force=False)
    assert asked == ["", ""], "what is installed needs no network"


def test_an_environment_that_has_everything_fetches_nothing():
    is_installed = runpy.run_path(str(ROOT / "packaging" / "is_installed.py"))
    is_met = is_installed["is_met"]
    assert is_met("pytest>=1", is_optional=False)
    assert is_met("no-such-package-anywhere; sys_platform == 'none'", is_optional=False)
    assert not is_met("pytest<1", is_optional=True)
    assert is_met("no-such-package-anywhere", is_optional=True)
    assert not is_met("no-such-package-anywhere", is_optional=False)
    with pytest.raises(KeyError):
        is_installed["is_installed"](["no-such-extra"])
