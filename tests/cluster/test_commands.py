"""The commands where there is no cluster, or where it says no: what they say, and what they leave alone."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest

from localrun import stored
from localrun.cli import exits
from localrun.cli.root import run
from localrun.cluster import reports, settings, view
from localrun.cluster.description import Description, Scale
from localrun.cluster.reports import AppReport, ClusterReport, Done, Event, Failed, NodeReport, ReplicaReport
from localrun.snapshot import EngineRow
from tests.cluster.test_reports import REPORT, bridge
from tests.cluster.test_settings import MEMBER, TOKEN

__all__ = ["bridge"]


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks as if it was installed."""
    spec = importlib.machinery.ModuleSpec("ray", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.parametrize("arguments", [["status"], ["drain", "studio"], ["down"], ["deploy", "alpha"]])
def test_a_machine_in_no_cluster_is_told_how_to_get_into_one(arguments, models_dir, monkeypatch, capsys):
    monkeypatch.setenv("LOCALRUN_MODELS", str(models_dir))
    assert run(["cluster", *arguments]) == exits.ERROR
    assert "in no cluster; `localrun cluster up` starts one" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["up"], ["status"], ["deploy", "alpha"], ["drain", "n"]])
def test_without_ray_the_extra_is_named(arguments, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("LOCALRUN_PORT", "1")
    assert run(["cluster", *arguments]) == exits.ERROR
    assert "pip install 'localrun[cluster]'" in capsys.readouterr().err
    assert not settings.file().exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["join", "127.0.0.1", "--token-file", "TOKEN", "--host", "0.0.0.0"], "--door"),
        (["join", "127.0.0.1", "--token-file", "no such file"], "does not exist"),
        (["join", "127.0.0.1"], "give --token-file"),
        (["join", "127.0.0.1:x", "--token-file", "TOKEN"], "not a port"),
        (["join", "127.0.0.1", "--token-file", "OPEN"], "chmod 600"),
        (["up", "--address", "192.0.2.77"], "no address of this machine"),
        (["deploy", "alpha", "--replicas", "-1"], "--replicas"),
        (["deploy", "alpha", "--min", "2"], "give --max as well"),
        (["deploy", "alpha", "--min", "3", "--max", "2"], "--min 3 is more than --max 2"),
        (["deploy", "alpha", "--replicas", "2", "--max", "4"], "leave it out, or --min and --max"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, capsys, arguments, said):
    stored.replace(tmp_path / "token", TOKEN.encode())
    (tmp_path / "open").write_text(TOKEN)
    (tmp_path / "open").chmod(0o644)
    files = {"TOKEN": str(tmp_path / "token"), "OPEN": str(tmp_path / "open")}
    assert run(["cluster", *(files.get(one, one) for one in arguments)]) == exits.USAGE
    assert said in capsys.readouterr().err
    assert not settings.file().exists()


@pytest.mark.parametrize("n_below", [0, 1])
def test_a_head_has_two_ports_of_its_own(capsys, n_below):
    said, port = "", 0
    while f":{port + 1}" in said or not said:  # that one may be anybody's
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            assert run(["cluster", "up", "--port", "0", "--head-port", str(port + n_below)]) == exits.PORT_BUSY
        said = capsys.readouterr().err
    assert f"the head cannot listen at 127.0.0.1:{port}," in said
    assert not settings.file().exists()


ALPHA = Description(model="alpha", contents="")


def replica(node: str, of: Description = ALPHA, **fields: object) -> ReplicaReport:
    said = {"host": "127.0.0.1", "port": 5, "pid": 7, "fingerprint": of.fingerprint, "n_slots": 4}
    return ReplicaReport(id=node, node=node, **(said | fields))  # type: ignore[arg-type]


def row(**fields: int) -> EngineRow:
    return EngineRow(model="alpha", pid=7, state="ready", kv_cells=1000, **fields)  # type: ignore[arg-type]


APP = AppReport(
    description=ALPHA, n_wanted=3, state="deploying", message="no room",
    replicas=(
        replica("n1", n_running=3, n_queued=2, tokens_per_s=10.5, row=row(kv_cells_used=300)),
        replica("n2", n_running=1, tokens_per_s=2.0, row=row(prompt_tokens_total=100, cached_tokens_total=25)),
    ),
)  # fmt: skip


def test_who_makes_a_key_on_a_machine_that_is_not_the_head_is_told_whose_keys_count(capsys):
    settings.keep(MEMBER, TOKEN)
    assert run(["key", "list"]) == exits.OK
    assert "doors of the cluster of 127.0.0.1:11433 go by the keys that are made there" in capsys.readouterr().err
    settings.forget()
    settings.keep(msgspec.structs.replace(MEMBER, is_head=True), TOKEN)
    assert run(["key", "list"]) == exits.OK
    assert capsys.readouterr().err == ""


def test_status_sums_what_replicas_say(bridge, capsys):
    bridge(ClusterReport(nodes=REPORT.nodes, apps=(APP,)), Done())
    assert run(["cluster", "status"]) == exits.OK
    shown = capsys.readouterr().out
    assert "studio (head)  alive" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("alpha  ") and "deploying" in line]
    assert line.split() == ["alpha", "deploying", "2/3", "4/8", "300/2000", "2", "12.5", "25%"]
    assert ["alpha", "n1", "3/4", "300/1000", "2", "10.5", "-", "5", "7"] in map(str.split, shown.splitlines())
    assert "alpha: no room" in shown


def test_a_node_that_came_back_is_not_dead_as_well(bridge, capsys):
    def node(name: str, number: int, state: str) -> NodeReport:
        return NodeReport(
            node=name, id=str(number), address="127.0.0.1", state=state, is_head=False, n_cpus=2, n_gpus=0
        )

    nodes = [node("n1", 1, "dead"), node("n1", 2, "alive"), node("n1", 3, "dead"), node("n2", 4, "dead"),
             node("n2", 5, "dead"), node("n3", 6, "alive"), node("n3", 7, "alive")]  # fmt: skip
    bridge(ClusterReport(nodes=tuple(nodes), apps=()), Done())
    assert run(["cluster", "status", "--json"]) == exits.OK
    shown = json.loads(capsys.readouterr().out)["nodes"]
    assert [(one["node"], one["id"]) for one in shown] == [("n1", "2"), ("n2", "5"), ("n3", "6"), ("n3", "7")]


def test_status_says_what_happened_last(bridge, capsys):
    bridge(ClusterReport(nodes=REPORT.nodes, apps=()), Done())
    assert run(["cluster", "status"]) == exits.OK
    assert "EVENT" not in capsys.readouterr().out
    stored.write(view.events_file(), [Event(1_700_000_000.0, "node n2 is gone")])
    assert run(["cluster", "status"]) == exits.OK
    assert capsys.readouterr().out.splitlines()[-1].endswith("  node n2 is gone")
    assert run(["cluster", "status", "--json"]) == exits.OK
    assert json.loads(capsys.readouterr().out)["events"] == [{"at_s": 1_700_000_000.0, "text": "node n2 is gone"}]


def test_status_is_read_by_programs(bridge, capsys):
    bridge(ClusterReport(nodes=REPORT.nodes, apps=(APP,)), Done())
    assert run(["cluster", "status", "--json"]) == exits.OK
    shown = json.loads(capsys.readouterr().out)
    assert [one["n_running"] for one in shown["apps"][0]["replicas"]] == [3, 1]
    assert [one["row"]["kv_cells_used"] for one in shown["apps"][0]["replicas"]] == [300, 0]
    assert shown["nodes"][0]["node"] == "studio"


def test_what_the_cluster_refuses_is_an_error(bridge, capsys):
    bridge(Failed("there is no node 'x'; there are studio"))
    assert run(["cluster", "drain", "x"]) == exits.ERROR
    assert "error: there is no node 'x'; there are studio" in capsys.readouterr().err


def test_what_cannot_be_deployed_says_why(bridge, models_dir, monkeypatch, capsys):
    monkeypatch.setenv("LOCALRUN_MODELS", str(models_dir))
    bridge(REPORT, Failed("'alpha' cannot be run: no room"))
    assert run(["cluster", "deploy", "alpha"]) == exits.ERROR
    assert "'alpha' cannot be run: no room" in capsys.readouterr().err
    assert run(["cluster", "deploy", "no-such-model"]) == exits.MODEL_NOT_FOUND


@pytest.mark.parametrize(
    ("bounds", "scale", "n_first"), [(["--min", "0", "--max", "4"], Scale(0, 4), 1), (["--max", "4"], Scale(1, 4), 1),
                                     (["--min", "2", "--max", "2"], Scale(2, 2), 2), ([], None, 1)],
)  # fmt: skip
def test_bounds_are_part_of_what_is_deployed(models_dir, monkeypatch, capsys, bounds, scale, n_first):
    monkeypatch.setenv("LOCALRUN_MODELS", str(models_dir))
    asked = []

    def ask(request):
        asked.append(request)
        running = [replica(f"n{number}", request.description) for number in range(n_first)]
        before, loading = replica("n7"), replica("n8", request.description, why_not="it is loading")
        app = AppReport(
            description=request.description, n_wanted=n_first, state="running", replicas=(before, loading, *running)
        )
        yield ClusterReport(nodes=(), apps=(app,))

    monkeypatch.setattr(reports, "ask", ask)
    assert run(["cluster", "deploy", "alpha", *bounds]) == exits.OK
    (deployed,) = asked
    assert (deployed.description.scale, deployed.n_replicas) == (scale, n_first)
    assert f"{n_first} of {n_first} replicas of alpha are ready" in capsys.readouterr().err


def test_down_ends_who_holds_the_node(capsys):
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started_at_s = psutil.Process(holder.pid).create_time()
    stored.write(
        settings.file(),
        settings.Membership(
            head="127.0.0.1:1", address="127.0.0.1", node="n", is_head=True, pid=holder.pid, started_at_s=started_at_s
        ),
    )
    threading.Thread(target=holder.wait, daemon=True).start()  # its parent has to take note of its end
    assert run(["cluster", "down"]) == exits.OK
    assert "the cluster is down" in capsys.readouterr().out
    assert holder.wait(10) != 0
