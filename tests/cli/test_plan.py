"""`localrun plan` as a user calls it. The machine's figures are made up: `tests/engine/tools` measures real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localrun import stored
from localrun.bench.tune import find_model
from localrun.cli import exits
from localrun.cli.bench.plan import MOST_REPLICAS, ROUTER_NAMES
from localrun.cli.root import run
from localrun.config import Settings
from localrun.plan import fleet
from localrun.plan.calibration import Calibration, path_of
from localrun.plan.costs import Costs, PromptCosts
from localrun.plan.fleet import ROUTERS
from tests.plan.made import costs, layout

TEAM = """
summary = "short questions"
[[source]]
name = "team"
prompt_tokens = 100
output_tokens = 8
"""
SHORT = ("tiny", "--workload", "team.toml")


def keep(of: Costs, settings: Settings) -> None:
    made = Calibration(
        made_at="2026-11-24T02:34:00+00:00", machine="made", model="tiny", build="b", layout=layout(slots=4), costs=of,
        median_error=0.04, worst_error=0.13, others=0.0,
    )  # fmt: skip
    stored.write(path_of(find_model("tiny", settings), settings), made)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    monkeypatch.setattr("localrun.plan.search.N_REQUESTS", 40)
    (tmp_path / "team.toml").write_text(TEAM)
    monkeypatch.chdir(tmp_path)
    keep(costs(), Settings())
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) == exits.OK
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) != exits.OK
    return " ".join(capsys.readouterr().err.split())


def test_it_says_what_is_carried_what_breaks_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *SHORT)
    assert "promise: first token within 2 s and 5 tokens/s or more, for 95 of 100 requests" in text
    assert "carries " in text
    assert "what breaks first: " in text
    assert "(simulated)" in text
    assert "never checked against a real run" in " ".join(text.split())
    found = json.loads(said(capsys, *SHORT, "--json"))
    assert found["basis"] == "calibration"
    assert found["what_if"]["twice"]["carries"]["rate_per_s"] > found["point"]["rate_per_s"]
    assert {"ttft_p95_s", "users", "kept"} <= found["points"][0].keys()


def test_it_can_be_asked_the_other_way_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the promise is kept" in said(capsys, *SHORT, "--users", "10")
    assert "the promise is broken" in said(capsys, *SHORT, "--rate", "500")
    assert "leave one of them out" in refused(capsys, "tiny", "--rate", "1", "--users", "5")


def test_variants_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = said(capsys, *SHORT, "--vary", "slots=1,4", "--vary", "machine=this,l4").splitlines()
    assert header.split()[:3] == ["slots", "machine", "carries"]
    assert [line.split()[:2] for line in lines[:4]] == [["1", "this"], ["1", "l4"], ["4", "this"], ["4", "l4"]]
    assert ["roofline" in line for line in lines[:4]] == [False, True, False, True]
    assert "rooflines are estimates" in " ".join(lines)
    text = said(capsys, *SHORT, "--vary", "slots=1,8", "--rate", "0.5")
    assert "the first that keeps it: 1" in text


def test_drafts_help_answers_that_repeat_their_prompt(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speedup() -> float:
        found = json.loads(said(capsys, *SHORT, "--vary", "speculation", "--rate", "0.5", "--json"))
        on, off = (row["point"]["each_p50_tokens_per_s"] for row in found["rows"])
        return float(on / off)

    keep(costs(alone_drafts=PromptCosts(0.010, 2e-4, 0.0)), Settings())
    team = TEAM.replace("output_tokens = 8", "output_tokens = 80")
    (tmp_path / "team.toml").write_text(team)
    assert speedup() == 1
    (tmp_path / "team.toml").write_text(team + "repeats = 0.95\n")
    assert speedup() > 1.3
    monkeypatch.setenv("LOCALRUN_SPECULATION", "off")
    asked = said(capsys, *SHORT, "--rate", "0.5")
    monkeypatch.setenv("LOCALRUN_SPECULATION", "on")
    assert asked != said(capsys, *SHORT, "--rate", "0.5")


def test_a_fleet_is_planned_with_each_router(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = said(capsys, *SHORT, "--rate", "40", "--replicas", "auto", "--router", "all", "--price-per-hour", "2")
    header, *lines = text.splitlines()
    assert header.split()[:2] == ["router", "replicas"]
    assert {line.split()[0]: int(line.split()[1]) > 1 for line in lines[:5]} == dict.fromkeys(ROUTER_NAMES, True)
    assert lines[0].split()[-2] == f"{2 * int(lines[0].split()[1])}"
    estimated = said(capsys, *SHORT, "--rate", "40", "--replicas", "2", "--machine", "l4")
    assert "from data sheets (roofline): 35% or more" in estimated


def test_the_names_of_routers_are_those_of_the_simulation() -> None:
    assert tuple(ROUTERS) == ROUTER_NAMES
    assert fleet.MOST_REPLICAS == MOST_REPLICAS


def test_it_says_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *SHORT, "--rate", "1", "--watts", "100", "--price-per-kwh", "0.3")
    assert "costs 0.03 an hour" in text
    assert "kWh per million tokens" in text


def test_what_no_calibration_reaches_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *SHORT, "--vary", "slots=4,64")
    assert "64: 4 slots were calibrated, and a forecast reaches to 8" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "--workload", "chta"], "did you mean 'chat'?"),
        (["tiny", "--vary", "machine=rtx4090"], "did you mean 'rtx-4090'?"),
        (["machines", "rtx4090"], "did you mean 'rtx-4090'?"),
        (["tiny", "--vary", "slot=4"], "did you mean 'slots'?"),
        (["tiny", "--vary", "slots=0"], "slots=0: a whole number from 1 to 256"),
        (["tiny", "--vary", "kv-type=f32"], "it is one of f16, q8_0, q4_0"),
        (["tiny", "--vary", "latency=quick"], "'quick' is not a latency"),
        (["tiny", "--vary", "speculation=maybe"], "speculation=maybe: it is on or off"),
        (["tiny", "--share", "1"], "share"),
        (["tiny", "--replicas", "3"], "needs a --rate"),
        (["tiny", "--rate", "3", "--replicas", "many"], "or auto"),
        (["tiny", "--watts", "60"], "--watts and --price-per-kwh go together"),
        (["tiny", "--itl-limit", "0.001"], "more than --itl-limit 0.001 allows"),
        (["tiny", "--ttft-limit", "0.01"], "more than --ttft-limit 0.01 allows"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_what_cannot_be_answered_says_why(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in refused(capsys, *arguments)


def test_a_broken_trace_names_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text('{"at_s": 1, "prompt": [["a", 5]], "output_tokens": 5}\n{"at_s": 0}\n')
    assert "line 2" in refused(capsys, "tiny", "--workload", str(path))


def test_machines_come_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rtx-4090" in said(capsys, "machines")
    text = said(capsys, "machines", "m4-max")
    assert "546 GB/s" in text
    assert "Apple's newsroom" in text
    assert "community figures" in text
    found: dict[str, Any] = json.loads(said(capsys, "machines", "--json"))
    assert all(each["source"] for each in found.values())


@pytest.mark.parametrize("word", ["calibrate", "check", "machines"])
def test_its_words_are_commands_of_their_own(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert f"plan {word}" in said(capsys, word, "--help").splitlines()[0]
