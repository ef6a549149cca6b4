"""The pinned versions are such as pyproject.toml asks for."""

from __future__ import annotations

import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.machine import PACKAGING


@pytest.fixture
def constraints(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(PACKAGING))
    import constraints

    yield constraints
    del sys.modules["constraints"]


def pinned(**machine: str) -> dict[str, Version]:
    """On Linux unless another `machine` is given, by the names of markers."""
    text = (PACKAGING / "constraints.txt").read_text(encoding="utf-8")
    found = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    here = {"sys_platform": "linux", "platform_machine": "x86_64"} | machine
    there = [each for each in found if each.marker is None or each.marker.evaluate(dict(here))]
    versions = {each.name: Version(str(each.specifier).removeprefix("==")) for each in there}
    assert len(versions) == len(there), "each is pinned once"
    return versions


def test_every_requirement_is_pinned_within_its_bounds(constraints):
    versions = pinned()
    for requirement in constraints.direct():
        name = constraints.canonical(requirement.name)
        assert name in versions, f"{name} is not pinned; run python packaging/generate.py constraints"
        assert requirement.specifier.contains(versions[name]), f"{name}=={versions[name]} is not {requirement}"


@pytest.mark.parametrize(
    ("system", "machine", "version"), [("darwin", "x86_64", "48.0.1"), ("win32", "ARM64", "46.0.3")]
)
def test_intel_macs_and_windows_on_arm_get_what_has_a_wheel_there(constraints, system, machine, version):
    here, there = pinned(), pinned(sys_platform=system, platform_machine=machine)
    assert {name for name in here if here[name] != there[name]} == set(constraints.OLDER)
    assert there["cryptography"] == Version(version)
    assert pinned(sys_platform="darwin", platform_machine="arm64") == here
    assert pinned(sys_platform="win32", platform_machine="AMD64") == here
    for requirement in constraints.direct():
        if requirement.name in there:
            assert requirement.specifier.contains(there[requirement.name])


def test_what_the_requirements_need_is_pinned_too(constraints):
    assert {"markupsafe", "h11", "mdurl"} <= set(pinned())
    assert set(constraints.pins()) >= {"markupsafe", "h11", "mdurl"}


def test_localrun_itself_and_the_training_tools_are_not_pinned():
    assert not {"localrun", "torch", "tokenizers"} & set(pinned())
