"""The interpreter, and whether the packages are the versions that this release needs."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from localrun.doctor.finding import Finding, fail, ok, warn

OLDEST = (3, 11)
_RUNNING = tuple(sys.version_info[:3])
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^;\s]+)")


def check_python(
    version: Sequence[int] = _RUNNING, *, is_64_bit: bool = sys.maxsize > 2**32, is_translated: bool = False
) -> Finding:
    """Whether the interpreter is one that localrun runs on. Rosetta `is_translated` programs for Intel processors."""
    shown = ".".join(str(part) for part in version[:3])
    if tuple(version[:2]) < OLDEST:
        return fail("python", f"Python {shown} is too old", "install Python 3.11 or newer and localrun with it")
    if not is_64_bit:
        return fail("python", f"Python {shown} is a 32-bit program", "install a 64-bit Python and localrun with it")
    if is_translated:
        return warn(
            "python", f"Python {shown} is an Intel program under Rosetta: engines are about ten times slower",
            "install a Python for Apple silicon (brew install python) and install localrun with it: "
            "PYTHON=/opt/homebrew/bin/python3 packaging/install.sh",
        )  # fmt: skip
    return ok("python", f"{shown} ({platform.machine() or 'unknown machine'}, {sys.executable})")


def check_packages(
    required: Sequence[str], installed: Callable[[str], str] = importlib.metadata.version
) -> Iterator[Finding]:
    """`required` are requirement lines; those with `==` and no marker are compared with what is installed."""
    wrong = []
    for line in required:
        match = _PINNED.match(line)
        if match is None or ";" in line:
            continue
        name, wanted = match.groups()
        try:
            found = installed(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found.partition("+")[0] != wanted:
            wrong.append((name, wanted, found))
    for name, wanted, found in wrong:
        yield fail("packages", f"{name} is {found}; this version needs {wanted}", pip(f"{name}=={wanted}"))
    if not wrong:
        yield ok("packages", "the versions that this release needs")


def own_requirements() -> Sequence[str]:
    """The requirement lines of the installed localrun; empty for one that runs from a bare checkout."""
    try:
        return importlib.metadata.requires("localrun") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def pip(arguments: str) -> str:
    """The command that installs into this interpreter's environment."""
    return f"{sys.executable} -m pip install {arguments}"
