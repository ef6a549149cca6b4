"""A daemon that is a door: what its bridge tells, and what its jobs get of it. Replicas are processes, without Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localrun import wire
from localrun.cluster import reports, settings
from localrun.cluster.description import Description, described
from localrun.cluster.door import Door
from localrun.cluster.reports import AppReport, ClusterReport, ReplicaReport
from localrun.config import NOTHING_ASKED
from localrun.errors import ModelNotFound, Unavailable
from localrun.models.storage.store import Store
from localrun.server.jobs.job import JobRequest
from localrun.server.runtime import Runtime
from tests.cluster.test_link import Machine
from tests.cluster.test_settings import MEMBER, TOKEN
from tests.cluster.test_wire import APP
from tests.cluster.test_wire import TOKEN as FRAMES_TOKEN
from tests.server.waiting import until


@pytest.fixture
def told(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Description:
    """The description that the replicas are of."""
    settings.keep(MEMBER, TOKEN)
    monkeypatch.setattr(reports.Watch, "start", lambda self: None)
    monkeypatch.setattr(settings, "frames_token", lambda: FRAMES_TOKEN)
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
        app = AppReport(description=description, n_wanted=1, state="running", replicas=replicas)
        self.door._on_report(ClusterReport(nodes=(), apps=(app,)))

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
    monkeypatch.setattr("localrun.cluster.lender.WAIT_S", 0.3)
    daemon.tell(machine, **changes)
    await daemon.taken()
    with pytest.raises(Unavailable, match="no replica of 'alpha'"):
        await daemon.ask()
    daemon.tell(machine)
    await daemon.ask()


async def test_at_the_end_nothing_is_lent(daemon: Daemon, machine: Machine) -> None:
    daemon.tell(machine)
    await daemon.taken()
    await daemon.door.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        await daemon.ask()
