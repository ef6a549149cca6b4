"""`serve` has a flag for every setting, and refuses wrong ones by name."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from localrun import config
from localrun.cli import exits
from localrun.cli.root import run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> list[tuple[config.Settings, float | None]]:
    """What `serve` would have started."""
    calls: list[tuple[config.Settings, float | None]] = []
    app: Any = types.ModuleType("localrun.server.app")
    app.serve = lambda settings, idle_exit_s: calls.append((settings, idle_exit_s))
    monkeypatch.setitem(sys.modules, "localrun.server.app", app)
    return calls


def test_without_flags_the_defaults_hold(served):
    assert run(["serve"]) == exits.OK
    assert served == [(config.Settings(), None)]


@pytest.mark.parametrize("field", config.Settings.__struct_fields__)
def test_every_setting_has_a_flag_with_help(field, served, capsys):
    texts = {"latency": "40", "kv_type": "q8_0", "log_level": "debug"}
    default = getattr(config.Settings(), field)
    text = texts.get(field, "::1" if isinstance(default, str) else "2048" if field.endswith("bytes") else "64")
    assert run(["serve", "--" + field.replace("_", "-"), text]) == exits.OK
    ((settings, _),) = served
    assert getattr(settings, field) == type(default)(text)
    assert run(["serve", "--help"]) == exits.OK
    assert config.env_name(field) in capsys.readouterr().out


def test_flags_win_over_the_environment_and_before_the_command_they_count_too(served, monkeypatch):
    monkeypatch.setenv("LOCALRUN_SLOTS", "3")
    monkeypatch.setenv("LOCALRUN_PORT", "1111")
    assert run(["serve", "--slots", "5", "--idle-exit", "30"]) == exits.OK
    assert run(["--port", "2222", "serve"]) == exits.OK
    assert run(["--port", "2222", "serve", "--port", "3333"]) == exits.OK
    assert [(settings.slots, settings.port, idle) for settings, idle in served] == [
        (5, 1111, 30.0),
        (3, 2222, None),
        (3, 3333, None),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slots", "many"], "--slots"),
        (["--slots", "0"], "--slots"),
        (["--slots", "1000"], "--slots"),
        (["--latency", "soon"], "interactive, balanced, throughput"),
        (["--kv-type", "f64"], "q8_0"),
        (["--idle-exit", "0"], "--idle-exit"),
        (["--speed", "9"], "--speed"),
    ],
)
def test_wrong_values_are_named_and_nothing_starts(arguments, words, served, capsys):
    assert run(["serve", *arguments]) == exits.USAGE
    assert words in capsys.readouterr().err
    assert served == []


def test_what_the_server_refuses_is_wrong_use_too(served, capsys, monkeypatch):
    def refuse(settings: config.Settings, idle_exit_s: float | None) -> None:
        raise config.ConfigError("host is '0.0.0.0', which other machines can reach")

    monkeypatch.setattr(sys.modules["localrun.server.app"], "serve", refuse)
    assert run(["serve", "--host", "0.0.0.0"]) == exits.USAGE
    assert capsys.readouterr().err.startswith("error: host is '0.0.0.0'")
