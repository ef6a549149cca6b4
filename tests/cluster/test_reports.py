"""A command's, and a door's, conversation with a bridge: programs that stand for it, without Ray."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from localrun import framing
from localrun.cluster import reports, settings
from localrun.cluster.reports import ClusterReport, Done, Failed, Look, NodeReport, Watch
from localrun.errors import NotFound, NotSupported, Unavailable
from tests.cluster.test_settings import MEMBER, TOKEN
from tests.server.waiting import until

NODE = NodeReport(node="studio", id="1", address="127.0.0.1", state="alive", is_head=True, n_cpus=2, n_gpus=0)
REPORT = ClusterReport(nodes=(NODE,), apps=())


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`bridge(message, ...)`: one that says so when it is asked, and ends after `end`; in a cluster."""
    settings.keep(MEMBER, TOKEN)

    def says(*messages: object, end: str = "") -> None:
        (tmp_path / "said").write_bytes(b"".join(map(framing.encode, messages)))
        program = (
            "import os, sys\n"
            "sys.stdin.buffer.read(4)\n"
            f"os.write(1, open({str(tmp_path / 'said')!r}, 'rb').read())\n"
            f"{end}"
        )
        monkeypatch.setattr(reports, "COMMAND", (sys.executable, "-c", program))

    return says


def test_an_answer_is_read_until_it_is_done(bridge):
    bridge(REPORT, Done(), REPORT)
    assert list(reports.ask(Look())) == [REPORT, Done()]


@pytest.mark.parametrize(
    ("messages", "end", "said"),
    [
        ((REPORT, Failed("there is no node 'x'")), "", "there is no node 'x'"),
        ((REPORT,), "sys.exit('no more')", "ended without an answer; its last words: no more"),
        ((REPORT, Look()), "", "does not answer"),
    ],
)
def test_what_fails_is_said(bridge, messages, end, said):
    bridge(*messages, end=end)
    with pytest.raises(Unavailable, match=said):
        list(reports.ask(Look()))


def test_a_machine_in_no_cluster_asks_nobody(monkeypatch):
    monkeypatch.setattr(reports, "COMMAND", ("no such program",))
    with pytest.raises(NotFound, match="in no cluster"):
        list(reports.ask(Look()))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotSupported, match=r"pip install 'localrun\[cluster\]'"):
        reports.require_ray()


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)", "os.write(1, b'\\xff' * 8)"])
async def test_a_watch_starts_another_bridge_when_one_ends(bridge, monkeypatch, end):
    monkeypatch.setattr(reports, "START_AGAIN_S", 0.01)
    bridge(REPORT, end=end)
    seen: list[ClusterReport] = []
    watch = Watch(seen.append)
    watch.start()
    await until(lambda: len(seen) > 2)
    await watch.stop()
    assert set(seen) == {REPORT}
