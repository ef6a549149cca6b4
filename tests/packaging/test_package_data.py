"""Files beside the modules that have to be in the packages: the built-in model, its licence, the pages, the styles."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.packaging.machine import ROOT

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
# Read by those who work on the sources alone.
SOURCE_ONLY = {"README.md", "figures.json"}


def packaged() -> set[Path]:
    """The files that the patterns of pyproject.toml take."""
    found: set[Path] = set()
    for package, patterns in SETUPTOOLS["package-data"].items():
        top = max((name for name in SETUPTOOLS["package-dir"] if f"{package}.".startswith(f"{name}.")), key=len)
        below = package.removeprefix(top).strip(".").replace(".", "/")
        folder = ROOT / SETUPTOOLS["package-dir"][top] / below
        for pattern in patterns:
            matches = set(folder.glob(pattern))
            assert matches, f"{package}: {pattern} matches nothing"
            found |= matches
    return found


def test_the_built_in_model_and_its_licence_are_packaged():
    assert {ROOT / "models/builtin/tiny.gguf", ROOT / "models/builtin/LICENSE"} <= packaged()


def test_every_page_is_packaged():
    assert set((ROOT / "localrun/docs").rglob("*.md")) <= packaged()


def test_nothing_that_the_program_reads_is_left_out():
    files = {
        path
        for folder in ("localrun", "models", "tui")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name not in SOURCE_ONLY
    }
    assert files - packaged() == set()


def test_the_manual_page_goes_where_man_looks():
    assert SETUPTOOLS["data-files"]["share/man/man1"] == ["packaging/localrun.1"]
