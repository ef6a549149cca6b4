"""A daemon that is a door: what its bridge tells, and what its jobs get of it. Replicas are processes, without Ray."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from localrun import wire
from localrun.access.books import OwnBooks
from localrun.access.keys import TOKENS, Limit
from localrun.cluster import ledger, reports
from localrun.cluster import settings as cluster_settings
from localrun.cluster.description import Description, described
from localrun.cluster.door import Door
from localrun.cluster.ledger import Ledger
from localrun.cluster.reports import AppReport, ClusterReport, ReplicaReport
from localrun.config import NOTHING_ASKED, Settings
from localrun.errors import ModelNotFound, PortBusy, Unavailable
from localrun.models.storage.store import Store
from localrun.server import app
from localrun.server.jobs.job import JobRequest
from localrun.server.runtime import Runtime
from tests.cluster.test_books import HeadMachine
from tests.cluster.test_link import Machine
from tests.cluster.test_settings import MEMBER, TOKEN
from tests.cluster.test_wire import APP
from tests.cluster.test_wire import TOKEN as FRAMES_TOKEN
from tests.fakes import ENGINE
from tests.server.batches.batch_files import chat_line, encoded
from tests.server.waiting import until


@pytest.fixture
def told(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Description:
    """The description that the replicas are of."""
    cluster_settings.keep(MEMBER, TOKEN)
    monkeypatch.setattr(reports.Watch, "start", lambda self: None)
    monkeypatch.setattr(cluster_settings, "frames_token", lambda: FRAMES_TOKEN)
    monkeypatch.setattr(Description, "fingerprint", APP)
    return described(Store(models_dir), "alpha", NOTHING_ASKED, 0)


class Daemon:
    """A door, and what its bridge says."""

    def __init__(self, runtime: Runtime, door: Door, told: Description, machines: list[Machine]) -> None:
        self.runtime, self.door, self._told, self._machines = runtime, door, told, machines

    def tell(self, *machines: Machine, why_not: str = "", fingerprint: str = APP, **of_description: Any) -> None:
        replicas = tuple(
            ReplicaReport(
                id=one.node, node=one.node, host="127.0.0.1", port=one.port, pid=0, fingerprint=fingerprint,
                why_not=why_not,
            )
            for one in machines
        )  # fmt: skip
        description = msgspec.structs.replace(self._told, **of_description)
        one = AppReport(description=description, n_wanted=1, state="running", replicas=replicas)
        self.door._on_report(ClusterReport(nodes=(), apps=(one,)))

    async def taken(self) -> None:
        await until(lambda: self.door._apps)

    async def ask(self, model: str = "alpha") -> list[int]:
        asked = wire.Submit(id=0, sampling=wire.Sampling(temperature=0), n_predict=5, ignore_eos=True)
        async with self.runtime.job(JobRequest(model=model, api="/test")) as job:
            await job.submit(asked, segments=[wire.Segment("x")])
            return [token for delta in [delta async for delta in job] for token in delta.tokens]

    @property
    def own(self) -> list[str]:
        """Models that this machine computes itself."""
        return [row.model for row in self.runtime.supervisor.loaded()]


@pytest.fixture
async def machine(models_dir: Path, home: Path) -> AsyncIterator[Machine]:
    machine = Machine(models_dir, "node1")
    await machine.start()
    yield machine
    await machine.stop()


@pytest.fixture
async def daemon(told: Description, machine: Machine, running: Any) -> AsyncIterator[Daemon]:
    door = Door()
    async with running(elsewhere=door) as runtime:
        yield Daemon(runtime, door, told, [machine])


async def test_a_model_of_the_cluster_is_computed_there_and_others_here(daemon: Daemon, machine: Machine) -> None:
    daemon.tell(machine)
    await daemon.taken()
    there = await daemon.ask()
    assert await daemon.ask("alpha:latest") == there
    assert daemon.own == []
    await daemon.ask("beta")
    assert daemon.own == ["beta"]


async def test_a_model_that_is_taken_back_is_this_machines_again(daemon: Daemon, machine: Machine) -> None:
    daemon.tell(machine)
    await daemon.taken()
    there = await daemon.ask()
    daemon.door._on_report(ClusterReport(nodes=(), apps=()))
    assert await daemon.ask() == there
    assert daemon.own == ["alpha"]


async def test_a_model_that_a_head_which_came_back_will_deploy_again_stays(daemon: Daemon, machine: Machine) -> None:
    daemon.tell(machine)
    await daemon.taken()
    there = await daemon.ask()
    assert isinstance(daemon.door._books, Ledger)
    daemon.door._books.models = frozenset({"alpha"})
    daemon.door._on_report(ClusterReport(nodes=(), apps=()))
    assert await daemon.ask() == there
    assert daemon.own == []


async def test_another_model_of_the_same_name_is_refused(daemon: Daemon, machine: Machine) -> None:
    daemon.tell(machine, contents="other")
    with pytest.raises(Unavailable, match="in a moment"):
        await daemon.ask()
    await until(lambda: daemon.door._refused)
    with pytest.raises(ModelNotFound, match="with other contents"):
        await daemon.ask()
    daemon.tell(machine)
    await until(lambda: daemon.door._apps)
    await daemon.ask()


@pytest.mark.parametrize("changes", [{"why_not": "it is loading"}, {"fingerprint": "of the version before"}])
async def test_replicas_that_cannot_compute_it_are_left_alone(
    daemon: Daemon, machine: Machine, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    monkeypatch.setattr("localrun.cluster.door.WAIT_S", 0.3)
    daemon.tell(machine, **changes)
    await daemon.taken()
    with pytest.raises(Unavailable, match="no replica of 'alpha'"):
        await daemon.ask()
    daemon.tell(machine)
    await daemon.ask()


async def test_a_request_that_names_no_model_gets_the_one_that_the_cluster_runs(
    told: Description, machine: Machine, settings: Callable[..., Settings]
) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    door = Door()
    async with serving(door, settings(), told, machine) as client:
        answer = await client.post("/v1/chat/completions", json=chat)
        assert answer.json()["model"] == "alpha"
        door._on_report(ClusterReport(nodes=(), apps=()))
        refused = await client.post("/v1/chat/completions", json=chat)
        assert "model is required" in refused.json()["error"]["message"]


async def test_at_the_end_nothing_is_lent(daemon: Daemon, machine: Machine) -> None:
    daemon.tell(machine)
    await daemon.taken()
    await daemon.door.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        await daemon.ask()


def test_a_port_below_the_heads_that_somebody_has_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster_settings.keep(msgspec.structs.replace(MEMBER, head=f"127.0.0.1:{port + 1}", is_head=True), TOKEN)
        with pytest.raises(PortBusy, match=f"port {port} of 127.0.0.1, .*; it is the one below --head-port"):
            Door().books(OwnBooks(home))


# --- batches ----------------------------------------------------------------------------------------------------------

N_LINES = 40


@asynccontextmanager
async def serving(door: Door, made: Settings, told: Description, machine: Machine) -> AsyncIterator[httpx2.AsyncClient]:
    """A door's daemon, as its clients see it."""
    runtime = Runtime(made, engine_command=ENGINE, elsewhere=door)
    transport = httpx2.ASGITransport(app=app.build(made, runtime))
    await runtime.start()
    try:
        Daemon(runtime, door, told, []).tell(machine)
        await until(lambda: door._apps)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client
    finally:
        await runtime.stop()


async def test_a_batch_goes_on_without_the_head_and_after_the_doors_restart(
    told: Description, machine: Machine, settings: Callable[..., Settings], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ledger, "LOOK_EVERY_S", 0.05)
    head = HeadMachine(tmp_path / "head", FRAMES_TOKEN)
    await head.start()
    new = head.keys.create("zed", limits=(Limit(TOKENS, 10**9, 86400.0),), n_concurrent=2)
    cluster_settings.forget()
    cluster_settings.keep(msgspec.structs.replace(MEMBER, head=f"127.0.0.1:{head.port + 1}"), TOKEN)
    headers = {"x-api-key": new.text}

    async def n_done(client: httpx2.AsyncClient) -> int:
        shown = (await client.get(f"/v1/batches/{batch}", headers=headers)).json()
        assert shown["request_counts"]["failed"] == 0, shown
        done: int = shown["request_counts"]["completed"]
        return done

    async def until_done(client: httpx2.AsyncClient, n: int) -> None:
        while await n_done(client) < n:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)

    lines = encoded([chat_line(f"r{n}", model="alpha") for n in range(N_LINES)])
    door = Door()
    await asyncio.to_thread(door.fetch)
    async with serving(door, settings(), told, machine) as client:
        sent = await client.post(
            "/v1/files", headers=headers, data={"purpose": "batch"}, files={"file": ("lines.jsonl", lines)}
        )
        asked = {"input_file_id": sent.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", headers=headers, json=asked)).json()["id"]
        await until_done(client, 3)
        await head.stop()
        await until(lambda: not door._books.is_there)  # type: ignore[union-attr]
        seen = await n_done(client)
        await head.start()
        await until_done(client, seen + 3)
    again = Door()
    async with serving(again, settings(), told, machine) as client:
        await until_done(client, N_LINES)
        await until(lambda: head.used()["zed"][0] == N_LINES)
        shown = (await client.get(f"/v1/batches/{batch}", headers=headers)).json()
        assert shown["status"] in ("completed", "finalizing")
        assert head.used()["zed"] == (N_LINES, shown["usage"]["output_tokens"])
    await head.stop()
