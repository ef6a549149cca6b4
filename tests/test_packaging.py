"""What a wheel would contain."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_of_the_tree_is_listed():
    folders = PROJECT["tool"]["setuptools"]["package-dir"]
    found = set()
    for name, folder in folders.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *parts)))
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_folder_with_code_is_a_package():
    for folder in PROJECT["tool"]["setuptools"]["package-dir"].values():
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), f"{module.parent} has no __init__.py"


def test_training_tools_are_no_dependency():
    names = " ".join(PROJECT["project"]["dependencies"])
    assert "torch" not in names
    assert "tokenizers" not in names
