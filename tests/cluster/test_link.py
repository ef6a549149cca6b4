"""Streams of one door on three replicas, each a process of its own: chosen by prefix, killed, hung, started again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrun import wire
from localrun.cluster import frames
from localrun.cluster import link as cluster_link
from localrun.cluster.affinity import Cost
from localrun.cluster.door import App, ClusterLender
from localrun.cluster.link import ClusterLink, Told, Turns
from localrun.cluster.reports import ReplicaReport
from localrun.cluster.wire_child import Address
from localrun.errors import BadRequest, Unavailable
from localrun.server.engines.resident import Use
from localrun.server.jobs.job import JobRequest
from localrun.server.runtime import Runtime
from tests.cluster import replica_process
from tests.cluster.test_wire import HELLO
from tests.server.waiting import n_resumed, until

ALPHA = JobRequest(model="alpha", api="/test")
PATIENCE_S = 60


class Machine:
    """A replica's process."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self.node = folder, node
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self.port = 0

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        self._process, self._pipe = replica_process.start(str(self._folder), "alpha", self.port)
        assert self._pipe.poll(PATIENCE_S)
        self.port = self._pipe.recv()

    async def report(self) -> ReplicaReport:
        """What it says of itself now."""
        assert self._pipe is not None
        self._pipe.send(self.node)
        said: ReplicaReport = await asyncio.to_thread(self._pipe.recv)
        return said

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port, self.node)

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def engine_pid(self) -> int | None:
        children = psutil.Process(self.pid).children()
        return children[0].pid if children else None

    async def kill(self) -> None:
        """As a machine that is gone: everything at once."""
        assert self._process is not None
        for process in psutil.Process(self.pid).children():
            process.kill()
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    async def leave(self) -> None:
        """As Serve ends a replica."""
        assert self._process is not None
        assert self._pipe is not None
        self._pipe.send(None)
        await asyncio.to_thread(self._process.join)

    async def stop(self) -> None:
        if self._process is not None and self._process.is_alive():
            await self.kill()


@pytest.fixture
async def machines(models_dir: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Machine]]:
    monkeypatch.setenv("LOCALRUN_FAKE_STEP_MS", "5")
    machines = [Machine(models_dir, f"node{number}") for number in range(3)]
    await asyncio.gather(*(machine.start() for machine in machines))
    yield machines
    await asyncio.gather(*(machine.stop() for machine in machines))


class Door:
    """A daemon whose model `alpha` is the cluster's."""

    def __init__(self, runtime: Runtime, link: ClusterLink) -> None:
        self.runtime, self.link = runtime, link

    async def stream(self, text: str, n_predict: int = 60, **fields: Any) -> list[int]:
        asked = wire.Submit(id=0, sampling=wire.Sampling(temperature=0), n_predict=n_predict, ignore_eos=True, **fields)
        async with self.runtime.job(ALPHA) as job:
            await job.submit(asked, segments=[wire.Segment(text)])
            return [token for delta in [delta async for delta in job] for token in delta.tokens]

    def streams(self, n: int, n_predict: int = 60) -> list[asyncio.Task[list[int]]]:
        return [asyncio.create_task(self.stream(f"stream {number}", n_predict)) for number in range(n)]

    def loads(self) -> list[int]:
        """Requests on each replica."""
        return sorted(link.n_requests for link in self.link.links().values())

    def used(self) -> set[str]:
        """Replicas that computed something for it."""
        return {name for name, link in self.link.links().items() if link.stats is not None}

    async def flowing(self, n: int) -> None:
        """Until so many streams run that have begun."""

        def begun() -> int:
            return sum(row.state == "decode" and row.output_tokens > 1 for row in self.runtime.registry.rows())

        await until(lambda: begun() >= n)

    @property
    def n_resumed(self) -> int:
        return n_resumed(self.runtime)


@pytest.fixture
async def door(running: Any, machines: list[Machine]) -> AsyncIterator[Door]:
    async with running() as runtime:
        link = ClusterLink(model="alpha", hello=HELLO, on_step=lambda *_: None)
        link.replicas({machine.node: machine.address for machine in machines})
        app = App(runtime.store.resolve("alpha"), "fingerprint", link)
        runtime.jobs.lender = ClusterLender(runtime.supervisor, lambda name: app if name == "alpha" else None)
        yield Door(runtime, link)
        await link.stop()


async def test_a_stream_is_the_same_wherever_it_is_computed(door: Door, running: Any) -> None:
    expected = [await door.stream(f"stream {number}", 20) for number in range(2)]
    async with running() as alone:
        assert [await Door(alone, door.link).stream(f"stream {number}", 20) for number in range(2)] == expected


async def test_other_models_are_this_machines(door: Door) -> None:
    async with door.runtime.job(JobRequest(model="beta", api="/test")):
        assert [row.model for row in door.runtime.supervisor.loaded()] == ["beta"]
    await door.stream("x", 3)
    assert len(door.runtime.supervisor.loaded()) == 1


async def test_streams_go_to_all_replicas_and_a_conversation_to_its_own(door: Door) -> None:
    streams = door.streams(12, 100)
    await until(lambda: sum(door.loads()) == 12)
    assert len(door.loads()) == 3
    assert max(door.loads()) <= 6
    await asyncio.gather(*streams)
    talk = "".join(random.Random(1).choices("abcdefgh ", k=3000))
    await door.stream(talk, 3)
    (first,) = [name for name, link in door.link.links().items() if link.stats and link.stats.prompt_tokens_total > 900]
    for more in ("and", "then", "some"):
        talk += more * 60
        await door.stream(talk, 3)
        stats = door.link.links()[first].stats
        assert stats is not None
        assert stats.cached_tokens_total > 0


async def test_killed_engines_lose_nothing(door: Door, machines: list[Machine]) -> None:
    expected = await asyncio.gather(*door.streams(8, 600))
    streams = door.streams(8, 600)
    draws = random.Random(3)
    for _ in range(3):
        await door.flowing(8)
        n_before = door.n_resumed
        victim = draws.choice([machine for machine in machines if _n_requests(door, machine)])
        os.kill(victim.engine_pid() or victim.pid, signal.SIGKILL)
        await until(lambda n_before=n_before: door.n_resumed > n_before)
    assert await asyncio.gather(*streams) == expected
    assert door.n_resumed >= 3


def _n_requests(door: Door, machine: Machine) -> int:
    link = door.link.links().get(machine.node)
    return 0 if link is None else link.n_requests


async def test_all_machines_gone_and_back_lose_nothing(door: Door, machines: list[Machine]) -> None:
    expected = await asyncio.gather(*door.streams(4, 300))
    streams = door.streams(4, 300)
    await door.flowing(4)
    for machine in machines:
        await machine.kill()
    await asyncio.sleep(0.5)
    await asyncio.gather(*(machine.start() for machine in machines))
    assert await asyncio.gather(*streams) == expected
    assert door.n_resumed >= 4


async def test_a_replica_that_hangs_is_left_within_four_seconds(door: Door, machines: list[Machine]) -> None:
    expected = await asyncio.gather(*door.streams(6, 300))
    streams = door.streams(6, 300)
    await door.flowing(6)
    hung = next(machine for machine in machines if _n_requests(door, machine))
    began_s = asyncio.get_running_loop().time()
    os.kill(hung.pid, signal.SIGSTOP)
    assert await asyncio.gather(*streams) == expected
    assert asyncio.get_running_loop().time() - began_s < frames.SILENCE_S + 20
    assert hung.node not in door.link.links()


async def test_fifty_kills_in_a_row_are_no_error_to_any_of_sixteen_clients(door: Door, machines: list[Machine]) -> None:
    """Engines and machines, and now and then one that hangs. Each machine comes back while the next one is killed."""
    expected = await asyncio.gather(*door.streams(16, 250))
    is_over = False

    def is_busy(machine: Machine) -> bool:
        return _n_requests(door, machine) > 0

    async def client(number: int) -> int:
        n_answers = 0
        while not is_over:
            assert await door.stream(f"stream {number}", 250) == expected[number]
            n_answers += 1
        return n_answers

    async def back(machine: Machine) -> None:
        await machine.kill()
        await machine.start()

    async def left(machine: Machine) -> None:
        await until(lambda: machine.node not in door.link.links())

    clients = [asyncio.create_task(client(number)) for number in range(16)]
    draws, returning = random.Random(50), set[asyncio.Task[None]]()
    for number in range(50):
        await until(lambda: any(map(is_busy, machines)) or any(task.done() for task in clients))
        assert [task.exception() for task in clients if task.done()] == []
        victim = draws.choice([machine for machine in machines if is_busy(machine)])
        if number % 5 == 0:
            os.kill(victim.engine_pid() or victim.pid, signal.SIGKILL)
            await left(victim)
            continue
        if number % 25 == 24:
            os.kill(victim.pid, signal.SIGSTOP)
            await left(victim)
        returning.add(asyncio.create_task(back(victim)))
        await left(victim)
        if len(returning) == len(machines) - 1:
            _, returning = await asyncio.wait(returning, return_when=asyncio.FIRST_COMPLETED)
    is_over = True
    n_answers = await asyncio.gather(*clients)
    await asyncio.gather(*returning)
    assert min(n_answers) >= 1
    assert door.n_resumed >= 50


async def _under_way(door: Door) -> tuple[list[list[int]], list[asyncio.Task[list[int]]]]:
    """What six streams say when nothing happens, and the same six again, of which each has begun."""
    expected = await asyncio.gather(*door.streams(6, 300))
    streams = door.streams(6, 300)
    await door.flowing(6)
    return expected, streams


async def test_a_replica_that_is_to_end_finishes_what_it_has_and_gets_nothing_new(
    door: Door, machines: list[Machine]
) -> None:
    expected, streams = await _under_way(door)
    leaving, *staying = machines
    n_before = _n_requests(door, leaving)
    door.link.replicas({machine.node: machine.address for machine in staying})
    assert await asyncio.gather(*door.streams(6, 20)) == [tokens[:20] for tokens in expected]
    assert _n_requests(door, leaving) == n_before > 0
    assert await asyncio.gather(*streams) == expected
    assert door.n_resumed == 0
    # Nothing runs there any more: the door leaves, and comes again when it is told so.
    door.link.replicas({machine.node: machine.address for machine in staying})
    await until(lambda: leaving.node not in door.link.links())
    door.link.replicas({leaving.node: leaving.address})
    await door.stream("x", 5)
    await until(lambda: list(door.link.links()) == [leaving.node])


async def test_what_a_replica_has_not_finished_at_its_end_goes_on_elsewhere(
    door: Door, machines: list[Machine]
) -> None:
    expected, streams = await _under_way(door)
    leaving, *staying = machines
    n_there = _n_requests(door, leaving)
    door.link.replicas({machine.node: machine.address for machine in staying})
    await leaving.leave()
    assert await asyncio.gather(*streams) == expected
    assert door.n_resumed == n_there > 0


async def test_no_replica_is_there_for_new_requests_while_the_last_one_ends(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.cluster.door.WAIT_S", 0.3)
    stream = asyncio.create_task(door.stream("long", 300))
    await door.flowing(1)
    door.link.replicas({})
    with pytest.raises(Unavailable, match="no replica of 'alpha'"):
        await door.stream("x", 5)
    assert len(await stream) == 300


async def test_counting_waits_for_a_replica_as_an_answer_does(door: Door, machines: list[Machine]) -> None:
    """Also when the last one goes after the model was borrowed, or nobody listens where it was."""
    addresses = {machine.node: machine.address for machine in machines}
    async with door.runtime.job(ALPHA) as job:
        expected = await job.count([wire.Segment("once upon a time")])
        door.link.replicas({})
        counting = asyncio.create_task(job.count([wire.Segment("once upon a time")]))
        await asyncio.sleep(0)
        door.link.replicas({"gone": Address("127.0.0.1", 1, "gone"), **addresses})
        assert await counting == expected


async def test_a_request_wakes_an_app_that_has_no_replica(door: Door, machines: list[Machine]) -> None:
    addresses = {machine.node: machine.address for machine in machines}
    door.link.replicas({})
    n_asked = 0

    def wake() -> None:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 2:
            door.link.replicas(addresses)

    door.link._wake = wake
    assert len(await door.stream("x", 5)) == 5
    assert n_asked == 2


# --- who chooses ------------------------------------------------------------------------------------------------------


async def test_whoever_knows_more_corrects_the_choice(door: Door, machines: list[Machine]) -> None:
    asked = []

    async def choose(first: bytes, costs: Mapping[str, Cost]) -> str:
        asked.append([tokens for tokens, _ in costs.values()])
        return machines[1].node

    door.link._ask = choose
    await asyncio.gather(*door.streams(5, 5))
    assert door.used() == {machines[1].node}
    # All of them know of each other, although none had been answered.
    assert len(asked) == 5
    assert len({sum(costs) for costs in asked}) == 5


@pytest.mark.parametrize("answer", ["", "a replica that is gone"])
async def test_a_choice_that_is_none_is_made_here(door: Door, answer: str) -> None:
    async def choose(*_: object) -> str:
        return answer

    door.link._ask = choose
    assert len(await door.stream("x", 5)) == 5


async def test_work_of_other_doors_keeps_requests_away(door: Door, machines: list[Machine]) -> None:
    addresses = {machine.node: machine.address for machine in machines}
    busy, *free = addresses
    door.link.replicas(addresses, {busy: Told(60_000.0), free[0]: Told(100.0)})
    await asyncio.gather(*door.streams(9, 5))
    assert door.used() == set(free)


async def test_a_beginning_that_another_door_had_computed_is_found(door: Door, machines: list[Machine]) -> None:
    addresses = {machine.node: machine.address for machine in machines}
    text = "x" * 3000
    prompt = cluster_link.prompt_of(wire.Submit(id=1, segments=(wire.Segment(text),)))
    usual = door.link._affinity.choose(prompt, dict.fromkeys(addresses, 0.0))
    other = next(name for name in addresses if name != usual)
    door.link.replicas(addresses, {other: Told(0.0, b"".join(prompt))})
    await door.stream(text + "y", 3)
    assert door.used() == {other}


async def test_what_a_replica_says_of_this_doors_own_work_is_not_counted_twice(
    door: Door, machines: list[Machine]
) -> None:
    addresses = {machine.node: machine.address for machine in machines}
    stream = asyncio.create_task(door.stream("x" * 4000, 300))
    await until(lambda: any(door.link._own_tokens().values()))
    own = door.link._own_tokens()
    door.link.replicas(addresses, {name: Told(tokens) for name, tokens in own.items()})
    assert max(door.link._waiting_tokens().values()) <= max(own.values())
    stream.cancel()


async def test_no_replica_at_all_is_said(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.cluster.door.WAIT_S", 0.3)
    door.link.replicas({})
    with pytest.raises(Unavailable, match="no replica of 'alpha'"):
        await door.stream("x")


async def test_a_request_can_be_cancelled_while_its_replica_is_being_found(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async with door.runtime.job(ALPHA) as job:
        monkeypatch.setattr(ClusterLink, "_link_to", never)
        await job.submit(wire.Submit(id=0, n_predict=5), segments=[wire.Segment("x")])
        await asyncio.sleep(0)
        job.request_cancel()
        deltas = [delta async for delta in job]
    assert deltas[-1].finish is wire.Finish.CANCELLED
    assert door.link._placed == {}


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (JobRequest(model="alpha", api="/test", use=Use.EMBED), "for text, not for embed"),
        (JobRequest(model="alpha", api="/test", draft="beta"), "draft models"),
    ],
)
async def test_what_the_cluster_does_not_do_is_refused(door: Door, ask: JobRequest, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        async with door.runtime.job(ask) as job:
            await job.submit(wire.Submit(id=0, n_predict=5), segments=[wire.Segment("x")])


async def test_nothing_is_left_when_all_have_ended(door: Door) -> None:
    await asyncio.gather(*door.streams(4, 5))
    assert door.link._placed == {}
    assert door.loads() == [0] * len(door.loads())


# --- turns ------------------------------------------------------------------------------------------------------------


async def test_as_many_take_a_turn_as_there_are_replicas() -> None:
    n_inside = most = 0
    turns = Turns(lambda: 3)

    async def take() -> None:
        nonlocal n_inside, most
        async with turns:
            n_inside += 1
            most = max(most, n_inside)
            assert turns.locked() == (n_inside == 3)
            await asyncio.sleep(0.001)
            n_inside -= 1

    await asyncio.gather(*(take() for _ in range(20)))
    assert (most, turns.locked()) == (3, False)


async def test_with_no_replica_one_may_try() -> None:
    turns = Turns(lambda: 0)
    assert not turns.locked()
    async with turns:
        assert turns.locked()


def test_what_a_prompt_is_chosen_by_tells_realms_apart():
    one, other = (
        cluster_link.prompt_of(wire.Submit(id=1, segments=(wire.Segment("x" * 600),), namespace=key))
        for key in (b"a", b"b")
    )
    assert not set(one) & set(other)
    assert len(one) == 2
