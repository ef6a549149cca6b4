"""A command's, and a door's, conversation with a bridge: programs that stand for it, without Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
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


# --- choices ----------------------------------------------------------------------------------------------------------

# Answers every choice after the first report, until it is told to be silent.
CHOOSING = """
import sys
from localrun import framing
from localrun.cluster.reports import Choose, Chosen, ClusterReport, decode_to_bridge

def say(message):
    sys.stdout.buffer.write(framing.encode(message))
    sys.stdout.buffer.flush()

say(ClusterReport(nodes=(), apps=()))
while (body := framing.read_body(sys.stdin.buffer)) is not None:
    asked = decode_to_bridge(body)
    if isinstance(asked, Choose) and asked.app != "silent":
        say(Chosen(asked.id, max(asked.costs) + asked.app))
"""


@pytest.fixture
async def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    settings.keep(MEMBER, TOKEN)
    monkeypatch.setattr(reports, "CHOICE_S", 5.0)
    monkeypatch.setattr(reports, "COMMAND", (sys.executable, "-c", CHOOSING))
    is_heard = asyncio.Event()
    watch = Watch(lambda report: is_heard.set())
    assert await watch.choose("app", b"x", {"a": (0.0, 0)}) == ""  # nobody is there yet
    watch.start()
    await is_heard.wait()
    yield watch
    await watch.stop()


async def test_each_request_gets_its_own_choice(watch: Watch) -> None:
    choices = (watch.choose(f"-{number}", b"x", {"a": (0.0, 0), "b": (1.0, 2)}) for number in range(20))
    assert await asyncio.gather(*choices) == [f"b-{number}" for number in range(20)]


async def test_a_bridge_that_is_too_slow_is_left_alone_for_a_while(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "CHOICE_S", 0.01)
    assert await watch.choose("silent", b"x", {"a": (0.0, 0)}) == ""
    monkeypatch.setattr(reports, "CHOICE_S", 5.0)
    assert await watch.choose("-1", b"x", {"a": (0.0, 0)}) == ""
    monkeypatch.setattr(watch, "_left_alone_until_s", 0.0)
    assert await watch.choose("-2", b"x", {"a": (0.0, 0)}) == "a-2"
    assert watch._choices == {}
