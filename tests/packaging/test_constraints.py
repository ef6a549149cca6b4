"""The pinned versions are such as pyproject.toml asks for."""

from __future__ import annotations

import re
import sys

import pytest
from packaging.version import Version

from tests.packaging.machine import PACKAGING


@pytest.fixture
def constraints(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(PACKAGING))
    import constraints

    yield constraints
    del sys.modules["constraints"]


def pinned() -> dict[str, Version]:
    text = (PACKAGING / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+)", line) for line in lines]
    assert all(found)
    return {match[1]: Version(match[2]) for match in found if match}


def test_every_requirement_is_pinned_within_its_bounds(constraints):
    versions = pinned()
    for requirement in constraints.direct():
        name = constraints.canonical(requirement.name)
        assert name in versions, f"{name} is not pinned; run python packaging/generate.py constraints"
        assert requirement.specifier.contains(versions[name]), f"{name}=={versions[name]} is not {requirement}"


def test_what_the_requirements_need_is_pinned_too(constraints):
    assert {"markupsafe", "h11", "mdurl"} <= set(pinned())
    assert set(constraints.pins()) >= {"markupsafe", "h11", "mdurl"}


def test_localrun_itself_and_the_training_tools_are_not_pinned():
    assert not {"localrun", "torch", "tokenizers"} & set(pinned())
