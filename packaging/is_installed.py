"""Exit status 0 when an environment has all that this checkout needs, so that nothing is fetched: the requirements of
pyproject.toml with the extras that are named, as constraints.txt pins them, and the checkout itself.

.venv/bin/python packaging/is_installed.py [EXTRA...]
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def is_met(line: str, *, is_optional: bool) -> bool:
    """Whether a requirement is installed; an optional one may be absent, but not in another version."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return is_optional


def is_installed(extras: Sequence[str]) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    pins = (ROOT / "packaging" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    try:
        own = distribution(project["name"])
        is_this = json.loads(own.read_text("direct_url.json") or "{}").get("url") == ROOT.as_uri()
    except PackageNotFoundError:
        return False
    return (
        is_this
        and own.version == project["version"]
        and all(is_met(line, is_optional=False) for group in groups for line in group)
        and all(is_met(line, is_optional=True) for line in pins if line.strip() and not line.startswith("#"))
    )


if __name__ == "__main__":
    sys.exit(not is_installed(sys.argv[1:]))
