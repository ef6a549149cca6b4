"""What a wheel would contain, by what pyproject.toml tells setuptools: no build, no network."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def wheel_files() -> dict[str, Path]:
    """Paths in the wheel, and the files of the tree that they are: the modules of each listed package, and its data."""
    setuptools = PROJECT["tool"]["setuptools"]
    found = {}
    for package in setuptools["packages"]:
        top = max((name for name in setuptools["package-dir"] if f"{package}.".startswith(f"{name}.")), key=len)
        folder = ROOT / setuptools["package-dir"][top] / package.removeprefix(top).strip(".").replace(".", "/")
        for pattern in ("*.py", *setuptools["package-data"].get(package, ())):
            for path in folder.glob(pattern):
                found[f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"] = path
    return found


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(path: Path, package: str) -> Iterator[str]:
    """Every module that a file of a package names in an import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield ".".join([*above, *([node.module] if node.module else [])])


def test_the_recipe_the_corpus_and_the_tests_are_in_no_wheel():
    files = wheel_files()
    assert {"localrun/models/builtin/tiny.gguf", "localrun/models/catalog.toml", "localrun/py.typed"} <= set(files)
    folders = {path.relative_to(ROOT).parts[0] for path in files.values()}
    assert folders == {"localrun", "models", "tui"}
    assert {path for path in files if path.startswith("localrun/models/builtin/")} == {
        f"localrun/models/builtin/{name}" for name in ("__init__.py", "tiny.gguf", "CARD.md", "LICENSE")
    }
    recipe = {path.name for path in (ROOT / "packaging" / "tiny").rglob("*.py")} - {"__init__.py"}
    assert {"train.py", "held_out.py", "conversation.py"} <= recipe
    assert not [path for path in files if path.startswith("localrun/models/") and Path(path).name in recipe]
    assert not [path for path in files if "test" in Path(path).name or "fake" in path or "synthe" in path]
    assert not [path for path in files if path.endswith(".py") and "FAKE" in files[path].read_text(encoding="utf-8")]


def test_everything_that_is_imported_at_run_time_is_in_the_wheel():
    files = wheel_files()
    modules = {module_of(path) for path in files if path.endswith(".py")}
    assert {"localrun.doctor.kernel_probe", "localrun.bench.session"} <= modules
    named = {
        name
        for path in files
        if path.endswith(".py")
        for name in imported(files[path], Path(path).parent.as_posix().replace("/", "."))
    }
    ours = {name for name in named if name.partition(".")[0] == "localrun"}
    assert {"localrun.models.storage.store", "localrun.server.runtime"} <= ours <= modules
    assert not {name.partition(".")[0] for name in named} & {"bench", "tests", "tiny", "torch", "tokenizers"}


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
