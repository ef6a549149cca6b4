"""The measurement of an unused daemon: it measures a real one, and knows when a figure is over its limit."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.script_module import module_of

SCRIPT = Path(__file__).parents[2] / "packaging" / "measure_idle.py"


@pytest.fixture
def measure_idle() -> ModuleType:
    return module_of(SCRIPT)


def test_a_daemon_is_measured_and_ended(measure_idle, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(measure_idle, "SETTLE_S", 0.1)
    path = tmp_path / "figures.json"
    assert measure_idle.main(["--rounds", "1", "--seconds", "0.5", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert 0 < figures["healthy_s"] < figures["first_token_s"]
    # Memory does not depend on how busy the machine is, unlike the other figures.
    assert 10 < figures["idle_rss_mb"] < measure_idle.LIMITS["idle_rss_mb"]
    assert set(measure_idle.LIMITS) <= set(figures)
    assert "idle_rss_mb" in capsys.readouterr().out


def test_a_figure_over_its_limit_is_named(measure_idle, monkeypatch, capsys):
    figures = dict.fromkeys(measure_idle.LIMITS, 0.1) | {"idle_rss_mb": 81.0}
    monkeypatch.setattr(measure_idle, "measure", lambda rounds, seconds: figures)
    assert measure_idle.main(["--check"]) == 1
    over = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "OVER" in line]
    assert over == ["idle_rss_mb"]
    assert measure_idle.main([]) == 0
    monkeypatch.setattr(measure_idle, "measure", lambda rounds, seconds: dict.fromkeys(measure_idle.LIMITS, 0.1))
    assert measure_idle.main(["--check"]) == 0
