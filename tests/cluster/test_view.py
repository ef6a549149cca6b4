"""What a door shows of the cluster: rows of its nodes, totals that nobody counts twice, and events in words. Replicas
are processes with fake engines, and what a bridge would tell is asked of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from localrun import wire
from localrun.cluster import reports, settings, view
from localrun.cluster.description import Description, described
from localrun.cluster.door import Door
from localrun.cluster.reports import AppReport, ClusterReport, NodeReport, ReplicaReport
from localrun.cluster.view import History, View
from localrun.config import NOTHING_ASKED
from localrun.models.storage.store import Store
from localrun.server.jobs.job import JobRequest
from localrun.server.openapi.operations import routes
from localrun.server.runtime import Runtime
from localrun.snapshot import NODE_TOTALS, EngineRow, Snapshot
from tests.cluster.test_link import PATIENCE_S, Machine
from tests.cluster.test_settings import MEMBER, TOKEN
from tests.cluster.test_wire import APP
from tests.cluster.test_wire import TOKEN as FRAMES_TOKEN
from tests.server.waiting import until

NODES = tuple(
    NodeReport(node=name, id=name, address="127.0.0.1", state="alive", is_head=name == "studio", n_cpus=2, n_gpus=0)
    for name in ("studio", "node0", "node1")
)


class Cluster:
    """Two replicas of `alpha`, and doors to them."""

    def __init__(self, machines: list[Machine], told: Description, running: Any) -> None:
        self.machines, self._told, self._running = machines, told, running

    async def report(self) -> ClusterReport:
        replicas = tuple(await asyncio.gather(*(machine.report() for machine in self.machines)))
        app = AppReport(description=self._told, n_wanted=2, state="running", replicas=replicas)
        return ClusterReport(nodes=NODES, apps=(app,))

    @asynccontextmanager
    async def door(self, *, is_head: bool = True) -> AsyncIterator[OneDoor]:
        door = Door()
        door.view.is_counted_here = is_head
        async with self._running(elsewhere=door) as runtime:
            listener = socket.create_server(("127.0.0.1", 0))
            server = uvicorn.Server(
                uvicorn.Config(Starlette(routes=routes(runtime)), log_level="warning", lifespan="off")
            )
            task = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                async with httpx2.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                    one = OneDoor(self, runtime, door, client)
                    await one.hears()
                    await until(lambda: bool(door._apps))
                    yield one
                    await one.end()
            finally:
                runtime.request_shutdown()
                server.should_exit = True
                await task
                listener.close()


class OneDoor:
    def __init__(self, cluster: Cluster, runtime: Runtime, door: Door, client: httpx2.AsyncClient) -> None:
        self._cluster, self.runtime, self.door, self.client = cluster, runtime, door, client
        self._streams: list[asyncio.Task[None]] = []

    async def hears(self) -> None:
        """What the bridge says every second."""
        self.door._on_report(await self._cluster.report())

    async def ask(self, text: str, model: str = "alpha", n_predict: int = 5) -> None:
        asked = wire.Submit(id=0, sampling=wire.Sampling(temperature=0), n_predict=n_predict, ignore_eos=True)
        async with self.runtime.job(JobRequest(model=model, api="/test")) as job:
            await job.submit(asked, segments=[wire.Segment(text)])
            async for _ in job:
                pass

    async def streams(self, n: int) -> None:
        """So many that run on."""
        self._streams += [asyncio.create_task(self.ask(f"{number} " * 40, n_predict=1500)) for number in range(n)]
        await until(lambda: sum(row.output_tokens > 3 for row in self.runtime.registry.rows()) >= n)

    async def end(self) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def snapshot(self) -> Snapshot:
        return msgspec.json.decode((await self.client.get("/localrun/v1/snapshot")).content, type=Snapshot)

    async def rows(self) -> dict[str, EngineRow]:
        """By node."""
        return {row.node: row for row in (await self.snapshot()).engines}

    async def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        page = (await self.client.get("/metrics")).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }


@pytest.fixture
async def cluster(
    models_dir: Path, home: Path, running: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    settings.keep(MEMBER, TOKEN)
    monkeypatch.setattr(reports.Watch, "start", lambda self: None)
    monkeypatch.setattr(settings, "frames_token", lambda: FRAMES_TOKEN)
    monkeypatch.setattr(Description, "fingerprint", APP)
    monkeypatch.setenv("LOCALRUN_FAKE_STEP_MS", "5")
    machines = [Machine(models_dir, f"node{number}") for number in range(2)]
    await asyncio.gather(*(machine.start() for machine in machines))
    yield Cluster(machines, described(Store(models_dir), "alpha", NOTHING_ASKED, 0), running)
    await asyncio.gather(*(machine.stop() for machine in machines))


# --- snapshots --------------------------------------------------------------------------------------------------------


async def test_a_door_shows_every_replica_and_where_its_requests_are(cluster: Cluster) -> None:
    async with cluster.door() as door:
        await door.ask("x", "beta")
        await door.streams(4)
        await door.hears()
        snapshot = await door.snapshot()
        assert [(row.model, row.node, bool(row.replica)) for row in snapshot.engines] == [
            ("beta", "studio", False), ("alpha", "node0", True), ("alpha", "node1", True),
        ]  # fmt: skip
        there = snapshot.engines[1:]
        assert [row.pid for row in there] == [machine.engine_pid() for machine in cluster.machines]
        assert sum(row.slots_busy for row in there) == 4
        assert all(row.state == "ready" and row.kv_cells == 8192 and row.rss_bytes for row in there)
        busy = {row.node: row.slots_busy for row in there if row.slots_busy}
        asked = [row.node for row in snapshot.requests if row.model == "alpha"]
        assert {node: asked.count(node) for node in asked} == busy
        assert [row.node for row in snapshot.requests if row.model == "beta"] == ["studio"]
        assert sum(row.tokens_per_s for row in there) > 100
        assert snapshot.aggregate.decode_tokens_per_s > 100
        one = (await door.client.get(f"/localrun/v1/requests/{snapshot.requests[-1].id}")).json()
        assert one["node"] in busy
        await door.end()


async def test_requests_of_other_doors_are_counted_where_they_run(cluster: Cluster) -> None:
    async with cluster.door() as one, cluster.door(is_head=False) as other:
        await one.streams(3)
        await other.streams(2)
        for door in (other, one):
            await door.hears()
            snapshot = await door.snapshot()
            assert (snapshot.aggregate.running, sum(row.slots_busy for row in snapshot.engines)) == (5, 5)
        assert len(snapshot.requests) == 3
        rates = [(await door.snapshot()).aggregate.decode_tokens_per_s for door in (one, other)]
        assert 0.5 < rates[0] / rates[1] < 2
        await other.end()
        await one.end()
        async with asyncio.timeout(PATIENCE_S):
            while (await one.snapshot()).aggregate.running:  # nobody asks for anything any more
                await one.hears()
        assert not any(row.slots_busy for row in (await one.snapshot()).engines)


async def test_own_requests_are_seen_step_by_step_between_reports(cluster: Cluster) -> None:
    async with cluster.door() as door:
        assert sum(row.slots_busy for row in (await door.snapshot()).engines) == 0
        await door.streams(3)
        rows = await door.rows()
        assert sum(row.slots_busy for row in rows.values()) == 3
        assert any(run.request is not None for row in rows.values() for run in row.kv_runs)
        await door.end()


async def test_what_is_heard_of_nowhere_is_unknown(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster.door() as door, cluster.door() as other:
        await other.streams(4)
        await door.hears()
        assert sum(row.slots_busy for row in (await door.rows()).values()) == 4
        monkeypatch.setattr(view, "SILENCE_S", -1)
        for row in (await door.rows()).values():
            assert (row.state, row.slots_busy, row.tokens_per_s) == ("unknown", 0, 0)
        assert (await door.snapshot()).aggregate.decode_tokens_per_s == 0
        await other.end()


async def test_a_request_that_goes_on_elsewhere_says_so(cluster: Cluster) -> None:
    async with cluster.door() as door:
        await door.streams(1)
        (before,) = door.runtime.registry.rows()
        await next(machine for machine in cluster.machines if machine.node == before.node).kill()
        await until(lambda: door.runtime.registry.rows()[0].output_tokens > before.output_tokens + 200)
        (after,) = door.runtime.registry.rows()
        assert (after.resumed, {before.node, after.node}) == (1, {"node0", "node1"})
        await door.end()


async def test_rows_are_made_when_somebody_looks(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    row_of = View._row
    monkeypatch.setattr(View, "_row", lambda *arguments: made.append(arguments) or row_of(*arguments))
    async with cluster.door() as door:
        chat = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        assert (await door.client.post("/v1/chat/completions", json=chat)).status_code == 200
        await door.hears()
        assert made == []
        await door.snapshot()
        assert made


# --- the other APIs ---------------------------------------------------------------------------------------------------


async def test_every_api_says_that_it_is_loaded(cluster: Cluster) -> None:
    async with cluster.door() as door:
        (loaded,) = (await door.client.get("/api/ps")).json()["models"]
        rows = await door.rows()
        assert loaded["name"] == "alpha:latest"
        assert loaded["size"] == sum(row.size_bytes for row in rows.values()) > 0
        assert loaded["context_length"] == rows["node0"].n_ctx
        tags = {row["name"]: row["loaded_as"] for row in (await door.client.get("/api/tags")).json()["models"]}
        assert {name: loaded for name, loaded in tags.items() if loaded} == {"alpha:latest": "alpha:latest"}
        listed = (await door.client.get("/api/v0/models")).json()["data"]
        assert {row["id"]: row["state"] for row in listed if row["state"] == "loaded"} == {"alpha": "loaded"}
        status = (await door.client.get("/models")).json()["data"]
        assert {row["id"]: row["status"]["value"] for row in status}["alpha"] == "loaded"
        props = (await door.client.get("/props")).json()
        assert (props["model_alias"], props["total_slots"]) == ("alpha", sum(row.slots for row in rows.values()))
        cache = (await door.client.get("/localrun/v1/cache")).json()
        assert [row["node"] for row in cache["models"]] == ["node0", "node1"]


async def test_slots_of_other_doors_are_taken(cluster: Cluster) -> None:
    async with cluster.door() as one, cluster.door() as other:
        await one.streams(2)
        await other.streams(3)
        await one.hears()
        slots = (await one.client.get("/slots?model=alpha")).json()
        assert len(slots) == sum(row.slots for row in (await one.rows()).values())
        assert sum(slot["is_processing"] for slot in slots) == 5
        assert len({slot["request"] for slot in slots if slot["is_processing"] and "request" in slot}) == 2
        await one.end()
        await other.end()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "alpha", "keep_alive": 0}),
        ("/api/chat", {"model": "alpha:latest", "messages": [], "keep_alive": 0}),
        ("/models/unload", {"model": "alpha"}),
    ],
)
async def test_no_request_unloads_it(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    async with cluster.door() as door:
        answer = await door.client.post(path, json=body)
        assert answer.status_code == 400
        assert f"`localrun cluster deploy {body['model']} --replicas 0`" in answer.text
        assert (await door.client.post(path, json=body | {"model": "beta"})).status_code in (200, 400)
        await door.ask("x")


# --- /metrics ---------------------------------------------------------------------------------------------------------


async def test_a_sum_over_doors_counts_nothing_twice(cluster: Cluster) -> None:
    async with cluster.door() as head, cluster.door(is_head=False) as other:
        for number in range(3):
            await head.ask(f"one {number}", n_predict=7)
            await other.ask(f"two {number}", n_predict=5)
        await other.ask("own", "beta")
        await head.hears()
        await other.hears()
        pages = [await head.samples(), await other.samples()]

        def total(name: str, **labels: str) -> float:
            wanted = labels.items()
            return sum(
                value for page in pages for (each, has), value in page.items() if each == name and wanted <= set(has)
            )

        assert total("localrun_output_tokens_total", model="alpha") == 3 * 7 + 3 * 5
        assert total("localrun_node_output_tokens_total", model="alpha") == 3 * 7 + 3 * 5
        assert total("localrun_node_prompt_tokens_total") == total("localrun_prompt_tokens_total", model="alpha")
        assert {dict(has)["node"] for page in pages for (name, has) in page if name == "localrun_slots"} == {
            "node0", "node1", "studio",
        }  # fmt: skip
        assert total("localrun_slots", model="alpha") == sum(
            row.slots for row in (await other.rows()).values() if row.replica
        )
        assert total("localrun_models_loaded") == 3
        assert total("localrun_requests_running", model="alpha") == 0
        assert not any(name.startswith("localrun_node_") for name, _ in pages[1])


def told(*replicas: ReplicaReport, n_wanted: int = 2, nodes: tuple[NodeReport, ...] = NODES) -> ClusterReport:
    description = Description(model="alpha", contents="")
    app = AppReport(description=description, n_wanted=n_wanted, state="running", replicas=replicas)
    return ClusterReport(nodes=nodes, apps=(app,))


def replica(name: str, node: str, n_tokens: int = 0, *, pid: int = 1, why_not: str = "") -> ReplicaReport:
    row = EngineRow(model="alpha", pid=pid, state="ready", output_tokens_total=n_tokens)
    return ReplicaReport(
        id=name, node=node, host="127.0.0.1", port=1, pid=1, why_not=why_not, row=None if why_not else row,
        fingerprint=Description(model="alpha", contents="").fingerprint,
    )  # fmt: skip


async def test_totals_never_fall_and_count_nothing_again() -> None:
    seen = View("studio", lambda model: {}, is_counted_here=True)

    def counted(*replicas: ReplicaReport) -> int:
        seen.told(told(*replicas))
        return sum(of_place["output_tokens_total"] for of_place in seen.totals().values())

    assert set(next(iter(NODE_TOTALS.values()))) & set(EngineRow.__struct_fields__)
    assert counted(replica("a", "node0", 1000)) == 0, "before this door was there"
    assert counted(replica("a", "node0", 1100), replica("b", "node0", 3)) == 100
    assert counted(replica("b", "node0", 13)) == 110
    assert counted(replica("a", "node0", 1150), replica("b", "node0", 13)) == 160, "it was only slow to answer"
    assert counted(replica("a", "node0", 20, pid=2), replica("b", "node0", 13)) == 180, "another engine begins anew"
    assert counted(replica("a", "node0", why_not="it died"), replica("b", "node0", 13)) == 180
    assert counted(replica("a", "node0", 5, pid=3), replica("b", "node0", 13)) == 185
    assert counted(replica("b", "node0", 14)) == 186, "one that is gone has done what it has"


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def happened() -> Any:
    """`happened(seconds, report)`: the events of a report, so many seconds after the beginning."""
    history = History()

    def hear(now_s: float, report: ClusterReport) -> list[str]:
        history.events = ()
        history.told(report, now_s)
        return [event.text for event in history.events]

    return hear


async def test_what_happens_is_said_in_words(happened: Any) -> None:
    assert happened(0, ClusterReport(nodes=(), apps=())) == []
    assert happened(1, told(replica("a", "node0"), nodes=NODES[:2], n_wanted=1)) == [], "it was so before"
    assert happened(2, told(replica("a", "node0"), n_wanted=2)) == [
        "node node1 joined", "alpha is to have 2 replicas instead of 1",
    ]  # fmt: skip
    assert happened(3, told(replica("a", "node0"), replica("b", "node1"))) == ["alpha runs on node1"]
    assert happened(4, told(replica("a", "node0", why_not="it was killed"), replica("b", "node1"))) == [
        "alpha on node0 has lost its engine: it was killed"
    ]
    assert happened(5, told(replica("a", "node0"), replica("b", "node1"))) == ["alpha runs on node0"]
    assert happened(6, told(replica("b", "node1"))) == [], "it may only be slow"
    assert happened(7, told(replica("a", "node0"), replica("b", "node1"))) == []
    assert happened(9, told(replica("b", "node1"))) == []
    assert happened(11, told(replica("b", "node1"))) == ["alpha on node0 is lost"]
    assert happened(12, told(replica("b", "node1"), nodes=(NODES[0], NODES[2]))) == ["node node0 is gone"]
    draining = (NODES[0], msgspec.structs.replace(NODES[2], state="draining"))
    assert happened(13, told(replica("b", "node1"), nodes=draining)) == ["node node1 is draining"]
    assert happened(20, told(nodes=draining)) == ["alpha on node1 has ended"]
    assert happened(21, ClusterReport(nodes=NODES[:1], apps=())) == [
        "node node1 is gone", "alpha is not run any more",
    ]  # fmt: skip


async def test_the_last_ten_are_kept_over_a_restart() -> None:
    history = History()
    for number in range(14):
        history.told(told(n_wanted=number), number)
    texts = [f"alpha is to have {number} replicas instead of {number - 1}" for number in range(4, 14)]
    await until(lambda: [event.text for event in view.kept_events()] == texts)
    again = History()
    again.told(told(n_wanted=1), 0)
    again.told(told(n_wanted=2), 1)
    await until(lambda: view.kept_events()[-1].text == "alpha is to have 2 replicas instead of 1")
    assert [event.text for event in view.kept_events()][:-1] == texts[1:]
