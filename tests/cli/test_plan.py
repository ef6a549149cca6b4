"""`localrun plan` as a user calls it. The machine's figures are made up: `tests/engine/tools` measures real ones."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrun import stored
from localrun.cli import exits
from localrun.cli.bench.plan import MOST_REPLICAS, ROUTER_NAMES
from localrun.cli.root import run
from localrun.config import Settings
from localrun.models.storage.model import kept_forecast
from localrun.models.storage.store import Store
from localrun.plan import calibration, fleet
from localrun.plan.calibration import Calibration, path_of
from localrun.plan.costs import Costs, PromptCosts, StreamCosts
from localrun.plan.fleet import ROUTERS
from localrun.plan.search import LEAST_REQUESTS
from tests.plan.made import costs, layout
from tests.support.synthesis.synthesize import synthesize

TEAM = """
summary = "short questions"
[[source]]
name = "team"
prompt_tokens = 100
output_tokens = 8
"""
SHORT = ("tiny", "--workload", "team.toml")


def keep(of: Costs, settings: Settings, name: str = "tiny") -> None:
    made = Calibration(
        made_at="2026-11-24T02:34:00+00:00", machine="made", model="tiny", build="b", layout=layout(slots=4), costs=of,
        median_error=0.04, worst_error=0.13, others=0.0,
    )  # fmt: skip
    stored.write(path_of(Store.of(settings).resolve(name), settings), made)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    # Enough that the warm-up is over; a forecast takes fifteen times as many.
    monkeypatch.setattr("localrun.plan.search.N_REQUESTS", 20)
    monkeypatch.setattr("localrun.plan.fleet.N_REQUESTS", 20)
    monkeypatch.setattr("localrun.plan.fleet.REQUESTS_OF_EACH", 20)
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


def test_lists_of_models_know_how_many_chats_there_can_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.plan.search.N_REQUESTS", LEAST_REQUESTS)
    digest = Store.of(Settings()).resolve("tiny").digest
    said(capsys, *SHORT)
    said(capsys, "tiny", "--ttft-limit", "5")
    assert kept_forecast(digest) is None  # of chats under the usual promise, nothing was asked yet
    point = json.loads(said(capsys, "tiny", "--json"))["point"]
    forecast = kept_forecast(digest)
    assert forecast is not None
    assert forecast.chats == int(point["users"])
    assert forecast.tokens_per_s == pytest.approx(point["each_p50_tokens_per_s"])


def test_it_can_be_asked_the_other_way_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the promise is kept" in said(capsys, *SHORT, "--users", "10")
    assert "the promise is broken" in said(capsys, *SHORT, "--rate", "500", "--ttft-limit", "0.5")
    assert "leave one of them out" in refused(capsys, "tiny", "--rate", "1", "--users", "5")


def test_variants_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = said(capsys, *SHORT, "--vary", "slots=1,4", "--vary", "machine=this,l4").splitlines()
    assert header.split()[:3] == ["slots", "machine", "carries"]
    assert [line.split()[:2] for line in lines[:4]] == [["1", "this"], ["1", "l4"], ["4", "this"], ["4", "l4"]]
    assert ["roofline" in line for line in lines[:4]] == [False, True, False, True]
    assert "rooflines are estimates" in " ".join(lines)
    text = said(capsys, *SHORT, "--vary", "slots=1,8", "--rate", "0.5")
    assert "the first that keeps it: 1" in text


def test_another_quantization_is_estimated_from_what_was_measured(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    """The file is F16, whose steps read 64 bytes for 32 weights; those of Q8_0 read 34."""
    keep(costs(streams=StreamCosts((1,), (0.064,), (0.0,)), sigma=0.0), Settings())
    command = ("--vary", "quantization=F16,Q8_0", "--rate", "0.1", "--json")
    own, other = json.loads(said(capsys, *SHORT, *command))["rows"]
    assert (own["band"], "estimate" in other["band"]) == ("", True)
    assert own["point"]["itl_p50_s"] / other["point"]["itl_p50_s"] == pytest.approx(64 / 34, rel=0.02)
    elsewhere = json.loads(said(capsys, *SHORT, *command, "--machine", "l4"))["rows"]
    assert elsewhere[0]["point"]["itl_p50_s"] > elsewhere[1]["point"]["itl_p50_s"]
    text = said(capsys, *SHORT, "--vary", "quantization=Q4_K_M")
    assert "(estimate)" in text
    assert "calibrate with the file itself" in " ".join(text.split())


def test_a_calibration_of_the_other_file_is_taken(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALRUN_MODEL_DIRS", str(home / "files"))
    own, other = home / "own.gguf", home / "files" / "other.gguf"
    other.parent.mkdir()
    synthesize("tiny", "Q8_0", own)
    synthesize("tiny", "F16", other)
    keep(costs(streams=StreamCosts((1,), (0.02,), (0.0,))), Settings(), str(own))
    keep(costs(streams=StreamCosts((1,), (0.05,), (0.0,))), Settings(), str(other))
    command = (str(own), *SHORT[1:], "--vary", "quantization=Q8_0,F16", "--rate", "0.1", "--json")
    rows = json.loads(said(capsys, *command))["rows"]
    assert [row["band"] for row in rows] == ["", ""]
    assert [row["point"]["itl_p50_s"] for row in rows] == pytest.approx([0.02, 0.05], rel=0.05)


def test_all_values_of_all_names_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("--vary", "slots=1", "--vary", "slots=4", "--vary", "latency=balanced,throughput", "--rate", "0.5")
    _, *lines = said(capsys, *SHORT, *command).splitlines()
    assert [tuple(line.split()[:2]) for line in lines[:4]] == [
        ("1", "balanced"), ("1", "throughput"), ("4", "balanced"), ("4", "throughput"),
    ]  # fmt: skip
    many = ",".join(map(str, range(1, 34)))
    assert "33 slots x 2 latency are 66 variants; at most 64" in refused(
        capsys, *SHORT, "--vary", f"slots={many}", "--vary", "latency=balanced,throughput"
    )


def test_only_a_promise_that_is_kept_at_the_lower_end_of_a_band_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of Q8_0 take 34 / 64 of the measured ones, and at the lower end of its band 1 / 0.65 times as long: 0.163
    and 0.204 s."""
    command = ("--rate", "0.02", "--itl-limit", "0.2")
    keep(costs(streams=StreamCosts((1,), (0.2,), (0.0,)), sigma=0.0), Settings())
    assert "the first that keeps it: Q8_0" in said(capsys, *SHORT, *command, "--vary", "quantization=Q8_0")
    keep(costs(streams=StreamCosts((1,), (0.25,), (0.0,)), sigma=0.0), Settings())
    text = said(capsys, *SHORT, *command, "--vary", "quantization=Q8_0")
    assert "kept 0% to 100% (estimate)" in text
    assert "none of them surely keeps it" in text


def test_several_gpus_and_how_they_split_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("--vary", "machine=rtx-4090x2,rtx-4090", "--vary", "split", "--rate", "0.1", "--json")
    rows = json.loads(said(capsys, *SHORT, *command))["rows"]
    assert [row["values"] for row in rows[:2]] == [["rtx-4090x2", "layer"], ["rtx-4090x2", "tensor"]]
    assert all("roofline" in row["band"] for row in rows[:3])
    assert "is one GPU, and nothing is split" in rows[3]["problem"]
    assert "2 times, each NVIDIA GeForce RTX 4090" in said(capsys, "machines", "rtx-4090x2")


def test_prices_are_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    priced = (*SHORT, "--rate", "1", "--price-per-hour", "3.6")
    point = (document := json.loads(said(capsys, *priced, "--json")))["point"]
    per_million = 3.6 * 1e6 / 3600 / point["tokens_per_s"]
    assert document["price"] == {"per_hour": 3.6, "per_million_tokens": pytest.approx(per_million)}
    header, row, *_ = said(capsys, *priced, "--vary", "slots=4").splitlines()
    assert header.endswith("per million")
    assert float(row.split()[-1]) == pytest.approx(per_million, rel=0.01)
    (priced_row,) = json.loads(said(capsys, *priced, "--vary", "slots=4", "--json"))["rows"]
    assert priced_row["price"] == document["price"]
    fleet = (*SHORT, "--rate", "1", "--replicas", "2", "--watts", "1000", "--price-per-kwh", "0.5")
    header, row, *_ = said(capsys, *fleet).splitlines()
    assert header.endswith("kWh per million")
    assert float(row.split()[-3]) == 1.0  # two of them for an hour
    assert float(row.split()[-1]) == pytest.approx(2 * float(row.split()[-2]), rel=0.01)


def test_a_picture_is_of_one_machine(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = ("--plot", str(home / "curve.png"))
    assert "--plot draws one curve, and these are 2 variants" in refused(capsys, *SHORT, "--vary", "slots=1,4", *drawn)
    assert "leave it out with --replicas" in refused(capsys, *SHORT, "--rate", "1", "--replicas", "2", *drawn)
    assert not (home / "curve.png").exists()
    said(capsys, *SHORT, "--machine", "l4", *drawn)
    assert (home / "curve.png").read_bytes()[:4] == b"\x89PNG"


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
    command = ("--rate", "40", "--ttft-limit", "0.5", "--router", "all", "--price-per-hour", "2")
    text = said(capsys, *SHORT, *command, "--replicas", "auto")
    header, *lines = text.splitlines()
    assert header.split()[:2] == ["router", "replicas"]
    assert {line.split()[0]: int(line.split()[1]) > 1 for line in lines[:5]} == dict.fromkeys(ROUTER_NAMES, True)
    assert lines[0].split()[-2] == f"{2 * int(lines[0].split()[1])}"
    estimated = said(capsys, *SHORT, "--rate", "40", "--replicas", "2", "--machine", "l4")
    assert "from data sheets (roofline): 35% or more" in estimated


def test_the_names_of_routers_are_those_of_the_simulation() -> None:
    assert tuple(ROUTERS) == ROUTER_NAMES
    assert fleet.MOST_REPLICAS == MOST_REPLICAS


def test_a_machine_that_was_not_measured_is_measured_first(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(model: Any, settings: Settings, tell: Any) -> Calibration:
        tell(f"measuring {model.name}")
        return made

    path = path_of(Store.of(Settings()).resolve("tiny"), Settings())
    made = calibration.kept(path)
    assert made is not None
    path.unlink()
    monkeypatch.setattr(calibration, "calibrate", measure)
    assert run(["plan", *SHORT, "--rate", "1"]) == exits.OK
    shown = capsys.readouterr()
    assert "measuring tiny" in shown.err
    assert "the promise is kept" in shown.out
    assert run(["plan", *SHORT, "--rate", "1"]) == exits.OK
    assert "measuring" not in capsys.readouterr().err


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
        (["tiny", "--vary", "speculation=maybe"], "speculation=maybe: it is one of on, off"),
        (["tiny", "--share", "1"], "share"),
        (["tiny", "--replicas", "3"], "needs a --rate"),
        (["tiny", "--rate", "3", "--replicas", "many"], "or auto"),
        (["tiny", "--vary", "machine=l4,rtx4090"], "did you mean 'rtx-4090'?"),
        (["tiny", "--machine", "rtx4090x2"], "did you mean 'rtx-4090'?"),
        (["tiny", "--machine", "m4x2"], "has no link to another one"),
        (["tiny", "--vary", "quantization=Q4_K_MM"], "did you mean 'Q4_K_M'?"),
        (["tiny", "--vary", "split=rows"], "split=rows: it is one of layer, tensor"),
        (["tiny", "--split", "tensor"], "--split is of several GPUs; name them with --machine"),
        (["tiny", "--router", "session"], "--router spreads requests over --replicas, which is missing"),
        (["tiny", "--vary", "machine=l4,rtx-4090", "--price-per-hour", "1"], "are of one machine"),
        (["tiny", "--watts", "60"], "--watts and --price-per-kwh go together"),
        (["tiny", "--itl-limit", "0.001"], "times what --itl-limit 0.001 allows"),
        (["tiny", "--ttft-limit", "0.01"], "times what --ttft-limit 0.01 allows"),
        (["no-such-model"], "no-such-model"),
        (["tiny", "--share", "nan"], "nan is not a number that can be reached"),
        (["tiny", "--machine", "l4", "--machine", "m4"], "--machine is given 2 times; --vary machine=A,B compares"),
        (["tiny", "--split=layer", "--split", "tensor"], "--split is given 2 times; --vary split=A,B compares"),
        (["tiny", "--rate", "1", "--rate", "2"], "--rate is given 2 times; give it once"),
        (["."], ". is a folder; name the GGUF file in it"),
        (["./nothing.gguf"], "./nothing.gguf: no such file"),
        (["chek"], "did you mean 'check'?"),
        (["machine"], "did you mean 'machines'?"),
        (["tiny", "--workload", "."], "--workload . is a folder"),
        (["tiny", "--plot", ""], "'' is not the name of a PNG"),
        (["tiny", "--plot", "-"], "'-' is not the name of a PNG"),
        (["tiny", "--plot", "x.jpg"], "'x.jpg' is not the name of a PNG"),
        (["tiny", "--plot", "team.toml/x.png"], "--plot team.toml/x.png cannot be written"),
    ],
)
def test_what_cannot_be_answered_says_why(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in refused(capsys, *arguments)


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="needs a device with a name")
def test_a_workload_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--workload /dev/null is no regular file" in refused(capsys, "tiny", "--workload", "/dev/null")


def test_nothing_that_was_asked_about_can_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ((), ("--json",)):
        assert run(["plan", *SHORT, "--vary", "slots=64,128", "--rate", "1", *form]) == exits.ERROR
        shown = capsys.readouterr().out
        assert "64: 4 slots were calibrated" in shown or form
        assert "surely" not in shown


@pytest.mark.parametrize("asked", [(), ("--rate", "1")])
def test_all_figures_of_a_roofline_have_a_band(capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]) -> None:
    """What it carries is at least 35 % less or more; what is asked about is given, and only the time differs."""
    found = json.loads(said(capsys, *SHORT, "--machine", "l4", "--price-per-hour", "2", "--json", *asked))["rows"][0]
    cheapest, dearest = found["price"]["per_million_tokens_band"]
    slowest, fastest = found["ends"]["tokens_per_s"]
    assert [cheapest, dearest] == pytest.approx([2e6 / 3600 / fastest, 2e6 / 3600 / slowest])
    assert cheapest <= found["price"]["per_million_tokens"] <= dearest
    rates = [0.65, 1.35] if not asked else [1, 1]
    assert found["ends"]["rate_per_s"][0] <= rates[0] * found["point"]["rate_per_s"] * 1.001
    assert found["ends"]["rate_per_s"][1] >= rates[1] * found["point"]["rate_per_s"] * 0.999
    assert asked == () or found["ends"]["rate_per_s"] == [1, 1]
    early, late = found["ends"]["ttft_p95_s"]
    assert early < late


def test_the_fewest_replicas_of_an_estimate_have_a_price_with_a_band(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = (*SHORT, "--rate", "2000", "--ttft-limit", "0.02", "--machine", "l4", "--price-per-hour", "2", "--json")
    found = json.loads(said(capsys, *fleet, "--replicas", "auto"))
    n = found["fleets"][0]["n_replicas"]
    assert n > 1
    assert found["prices"][0]["per_hour_band"] == [2 * math.ceil(n / 1.35), 2 * math.ceil(n / 0.65)]
    price = json.loads(said(capsys, *fleet, "--replicas", "4"))["prices"][0]
    assert "per_hour_band" not in price
    assert price["per_million_tokens_band"] == pytest.approx([price["per_million_tokens"] / f for f in (1, 0.65)])


def test_as_many_users_are_in_the_row_as_in_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, *SHORT).splitlines()
    row = next(line for line in lines if line.startswith(">"))
    assert f"carries {row.split()[1]} users" in lines


def test_a_picture_that_fails_costs_no_forecast(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localrun.plan.report.plot", fail)
    assert run(["plan", *SHORT, "--rate", "1", "--plot", "new/curve.png"]) == exits.ERROR
    shown = capsys.readouterr()
    assert "the promise is kept" in shown.out
    assert "curve.png was not drawn: No space left on device" in " ".join(shown.err.split())
    assert list((home / "new").iterdir()) == []


def test_a_forecast_that_cannot_be_kept_is_shown(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.plan.search.N_REQUESTS", LEAST_REQUESTS)
    (home / "data" / "forecasts").write_text("in the way")
    assert run(["plan", "tiny"]) == exits.OK
    shown = capsys.readouterr()
    assert "carries " in shown.out
    assert "warning: this forecast could not be kept" in " ".join(shown.err.split())


@pytest.mark.parametrize("command", [("calibrate", "tiny"), (*SHORT, "--rate", "1")])
def test_nothing_is_measured_that_could_not_be_kept(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("LOCALRUN_HOME", str(home / "file"))
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("it was measured"))
    text = refused(capsys, *command)
    assert "LOCALRUN_HOME can name a folder that can be written" in text
    assert "localrun-temp" not in text


@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C goes to those of one console")
def test_ctrl_c_ends_a_measurement_quietly() -> None:
    """A terminal sends it to the whole group of processes in front."""
    command = [sys.executable, "-m", "localrun", "plan", "calibrate", "tiny"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        parent = psutil.Process(process.pid)
        while not (children := parent.children()):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, problem = process.communicate(timeout=60)
    assert process.returncode == exits.INTERRUPTED
    assert "Traceback" not in problem
    assert psutil.wait_procs(children, timeout=60)[1] == []


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
