"""The versions that an installation is known to work with: `packaging/constraints.txt`.

Walks from localrun's own requirements, with the extras that are there, over the packages installed beside it, and pins
each to the installed version. `pip install --constraint` then takes the same ones again. Packages that only other
systems need are not among them.

Does not: ask an index, or install anything.
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = ("", "nvidia", "bench", "dev")
# The last versions that have a wheel for Macs with an Intel processor and for Windows on Arm: later ones would be
# built there, with Rust.
OLDER = {"cryptography": {("darwin", "x86_64"): "48.0.1", ("win32", "ARM64"): "46.0.3"}}
HEAD = """\
# The versions that localrun is tested with, everything that it needs included. Used by packaging/install.sh and the
# Dockerfile; `pip install --constraint packaging/constraints.txt .` does the same by hand.
# Written by packaging/generate.py from an environment that passed the tests.
"""


def canonical(name: str) -> str:
    """A package's name as indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def direct() -> list[Requirement]:
    """What pyproject.toml asks for, the extra for training left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS if extra for text in optional[extra])]
    return [Requirement(text) for text in texts]


def _needed(requirement: Requirement) -> list[Requirement]:
    """What an installed package asks for here, with the extras that `requirement` names."""
    extras = ("", *requirement.extras)
    texts = metadata.requires(requirement.name) or []
    found = [Requirement(text) for text in texts]
    return [one for one in found if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def pins() -> dict[str, str]:
    """Canonical name -> version, of everything that is installed and needed."""
    versions: dict[str, str] = {}
    seen: set[str] = set()
    waiting = direct()
    while waiting:
        requirement = waiting.pop()
        key = str(requirement)
        if key in seen:
            continue
        seen.add(key)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue  # for another system, or an extra that is not installed here
        versions[canonical(requirement.name)] = version
        waiting.extend(_needed(requirement))
    return versions


def text() -> str:
    """The file."""
    lines = []
    for name, version in sorted(pins().items()):
        older = OLDER.get(name, {})
        elsewhere = " and ".join(f"(sys_platform != '{on}' or platform_machine != '{of}')" for on, of in older)
        lines += [f"{name}=={version}" + (f"; {elsewhere}" if older else "")]
        for (system, machine), old in older.items():
            lines += [f"{name}=={old}; sys_platform == '{system}' and platform_machine == '{machine}'"]
    return HEAD + "".join(f"{line}\n" for line in lines)
