"""`localrun bench tiers` as a user calls it, on a daemon with fake engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrun.access.keys import KeyFile
from localrun.cli import exits
from localrun.cli.root import run
from tests.daemon import running_daemon
from tests.support.synthesis.synthesize import synthesize

SETTINGS = """
[tiers.smart]
small = "tiny"
large = "big"
tools = "large"
"""


def test_shares_and_seconds_of_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "localrun.toml").write_text(SETTINGS, encoding="utf-8")
    (tmp_path / "data" / "models").mkdir(parents=True)
    synthesize("tiny", "Q4_0", tmp_path / "data" / "models" / "big.gguf")
    KeyFile(tmp_path / "data").create("someone")  # so that this command, too, needs its local key
    with running_daemon("--kv-cells", "32768", LOCALRUN_HOME=str(tmp_path)) as daemon:
        monkeypatch.setenv("LOCALRUN_PORT", str(daemon.port))
        monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
        assert run(["bench", "tiers", "smart", "--json", str(tmp_path / "run.json"), "--seed", "1"]) == exits.OK
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["tools", "1", "0", "1", "tools", "1"] in lines
        assert ["short", "8", "8", "0", "default", "8"] in lines
        answers = json.loads((tmp_path / "run.json").read_text())["run"]["answers"]
        assert [answer["model"] for answer in answers if answer["asked"] == "big"] == ["big"] * 11
        assert run(["bench", "tiers", "tiny"]) == exits.ERROR
        assert "'tiny' is a model and no tier" in capsys.readouterr().err
        assert run(["list"]) == exits.OK
        assert any(
            line.startswith("smart:latest ") and " tier" in line for line in capsys.readouterr().out.splitlines()
        )
        assert run(["show", "smart"]) == exits.OK
        assert "Tier\n  name                smart\n" in capsys.readouterr().out
        assert run(["stop", "smart"]) == exits.OK
        assert "unloaded smart" in capsys.readouterr().out
