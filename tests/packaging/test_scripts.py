"""The shell scripts, the Dockerfile and the formula, by linters where they are installed."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.machine import PACKAGING, ROOT

DOCKERFILE = PACKAGING / "Dockerfile"
SCRIPTS = [*sorted(PACKAGING.rglob("*.sh")), ROOT / ".ci" / "run"]


def program(name: str) -> str:
    """The path of a program, also of one that is installed beside Python. Skips the test without it."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def linted(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return ran.stdout + ran.stderr + ("" if ran.returncode == 0 else f"\nexit status {ran.returncode}")


def test_shellcheck_has_nothing_to_say():
    assert linted(program("shellcheck"), *map(str, SCRIPTS)) == ""


def test_hadolint_has_nothing_to_say():
    assert linted(program("hadolint"), str(DOCKERFILE)) == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_error(script: Path):
    assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")
    assert script.stat().st_mode & 0o111


def test_images_run_as_nobody_in_particular_and_say_how_they_are():
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    final = [stage for stage in stages if re.search(r" AS (cpu|cuda)$", stage.splitlines()[0])]
    assert len(final) == 2
    for stage in final:
        assert re.search(r"^USER 10001:10001$", stage, re.MULTILINE)
        assert re.search(r"^HEALTHCHECK .*\n.*/health", stage, re.MULTILINE)
        assert stage.index("USER ") < stage.index("ENTRYPOINT ")
    assert stages[-1] is final[-1]
    assert stages[-1].splitlines()[0].endswith("AS cpu"), "the image without --target is that for the processor"


def test_an_image_gets_all_that_an_installation_is_built_from():
    ignored = (PACKAGING / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[tool.setuptools.data-files]")[2].partition("\n\n")[0]
    for path in (
        *re.findall(r'"(packaging/[^"]+)"', table),
        "localrun",
        "models",
        "tui",
        "pyproject.toml",
        "README.md",
    ):
        assert f"!{path}\n" in ignored


def test_the_formula_of_a_source_package(tmp_path: Path):
    source = tmp_path / "localrun-1.2.3.tar.gz"
    source.write_bytes(b"a package")
    command = [sys.executable, str(PACKAGING / "formula.py"), "--url", "https://example.org/x.tar.gz", str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert 'url "https://example.org/x.tar.gz"' in ran.stdout
    assert 'version "1.2.3"' in ran.stdout
    assert f'sha256 "{hashlib.sha256(b"a package").hexdigest()}"' in ran.stdout
    assert re.findall(r"@[A-Z0-9]+@", ran.stdout) == []
    if shutil.which("ruby"):
        formula = tmp_path / "localrun.rb"
        formula.write_text(ran.stdout, encoding="utf-8")
        assert linted("ruby", "-wc", str(formula)).strip() == "Syntax OK"


def test_a_formula_of_another_file_is_refused(tmp_path: Path):
    other = tmp_path / "other.zip"
    other.touch()
    ran = subprocess.run([sys.executable, str(PACKAGING / "formula.py"), str(other)], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "localrun-VERSION.tar.gz" in ran.stderr
