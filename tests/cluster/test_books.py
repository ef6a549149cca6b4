"""The books of a cluster: its head and its doors, over their connections, without Ray and without engines.

A door is a `Ledger` and what an access layer does with it, the head a `State` over an ordinary daemon's books.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun import framing
from localrun.access.books import OwnBooks, UsageFile, UsageRecord
from localrun.access.keys import REQUESTS, TOKENS, KeyFile, Limit
from localrun.cluster import frames, ledger, reports, state
from localrun.cluster import settings as cluster_settings
from localrun.cluster.description import Description
from localrun.cluster.ledger import Head, Knock, Ledger, Line, Look, News
from localrun.cluster.reports import Deploy, Done
from localrun.cluster.state import State
from localrun.config import Settings
from localrun.errors import BadRequest, Conflict, InvalidKey, RateLimited, Unauthorized, Unavailable
from localrun.server.http.access import Access, Caller, Right
from localrun.server.http.failures import Shape
from localrun.snapshot import RequestState
from localrun.wire import Lane
from tests.server.waiting import until

TOKEN = b"t" * 32
PATIENCE_S = 30
DAY_S = 86400.0


class HeadMachine:
    """The head's daemon, as far as books go. It comes and goes, with what is in its folder."""

    def __init__(self, folder: Path, token: bytes = TOKEN) -> None:
        self.folder, self.token = folder, token
        self.keys = KeyFile(folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.books: OwnBooks | None = None
        self.state: State | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> Head:
        return Head("127.0.0.1", self.port, self.token, None)

    async def start(self, encryption: ssl.SSLContext | None = None) -> None:
        self.books = OwnBooks(self.folder)
        self.state = State(self.books, self.folder, self.token)
        at = socket.create_server(("127.0.0.1", self.port))
        self._task = asyncio.create_task(self.state.run(at, encryption))
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)  # it answers
        writer.close()

    async def stop(self) -> None:
        if self._task is not None and self.books is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            await until(lambda: self.state is not None and not self.state._conversations)
            self.books.usage.close()

    def used(self) -> dict[str, tuple[int, int]]:
        """Requests and tokens of answers, by key."""
        assert self.books is not None
        return {one.name: (one.requests, one.output_tokens) for one in self.books.usage.totals("key")}


class DoorMachine:
    """A door's daemon, as far as books go."""

    def __init__(self, head: HeadMachine, folder: Path) -> None:
        self._head, self.folder = head, folder
        self.ledger = Ledger(head.address, folder / "cluster")
        self.access: Access | None = None

    async def start(self) -> None:
        self.ledger.start()
        self.access = Access(Settings(), self.ledger, state=self.folder)
        await until(lambda: self.ledger.is_there)

    async def stop(self) -> None:
        await self.ledger.stop()
        self.ledger.usage.close()

    async def kill(self) -> None:
        """What is in memory is lost, and the head hears no more."""
        assert self.ledger._task is not None
        assert self.ledger._line is not None
        self.ledger._task.cancel()
        self.ledger._line.close()
        await asyncio.gather(self.ledger._task, return_exceptions=True)
        self.ledger._line.close()

    async def come(self, text: str, *, right: Right = Right.USE) -> Caller:
        """A request with this key, as far as the door lets it come before a model is named."""
        assert self.access is not None
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "scheme": "https",
            "client": ("192.0.2.1", 5), "headers": [(b"x-api-key", text.encode())],
        }  # fmt: skip
        caller = await self.access.admit(scope, right)
        assert caller is not None
        return caller

    async def ask(self, text: str, n_output: int = 0) -> None:
        """A whole request of one answer. Raises what it is refused with."""
        caller = await self.come(text)
        try:
            caller.begin("tiny", Lane.DEFAULT)
            caller.record_usage(answer(n_output), counts_prompt=False)
        finally:
            caller.leave()
            caller.commit()

    async def asks(self, text: str, n: int, n_output: int = 0) -> int:
        """So many requests, one after the other. How many were let in."""
        n_let_in = 0
        for _ in range(n):
            try:
                await self.ask(text, n_output)
                n_let_in += 1
            except RateLimited:
                continue
        return n_let_in


def answer(n_output: int) -> Any:
    """As much of a generation's record as is counted."""

    class Record:
        state = RequestState.DONE
        n_computed = n_prompt = n_cached = 0
        model = "tiny"
        was_loaded = True

    Record.n_output = n_output  # type: ignore[attr-defined]
    return Record()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LOOK_EVERY_S", 0.05)


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[HeadMachine]:
    machine = HeadMachine(tmp_path / "head")
    await machine.start()
    yield machine
    await machine.stop()


@pytest.fixture
async def doors(head: HeadMachine, tmp_path: Path) -> AsyncIterator[list[DoorMachine]]:
    machines = [DoorMachine(head, tmp_path / f"door{n}") for n in range(2)]
    for machine in machines:
        await machine.start()
    yield machines
    for machine in machines:
        await machine.stop()


# --- keys -------------------------------------------------------------------------------------------------------------


async def knows(door: DoorMachine, text: str, *, does: bool = True) -> None:
    async def is_so() -> bool:
        try:
            (await door.come(text)).leave()
        except Unavailable:
            return False
        except InvalidKey:
            return not does
        return does

    for _ in range(400):
        if await is_so():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never did")


async def test_a_key_made_at_the_head_holds_at_all_doors_until_it_is_revoked(head, doors):
    new = head.keys.create("zed")
    for door in doors:
        await knows(door, new.text)
    head.keys.revoke("zed")
    for door in doors:
        await knows(door, new.text, does=False)
        with pytest.raises(InvalidKey, match="was revoked"):
            await door.come(new.text)


async def test_a_damaged_file_of_keys_at_the_head_takes_nobody_in_and_throws_nobody_out(head, doors):
    new = head.keys.create("zed")
    await knows(doors[0], new.text)
    head.keys.path.write_bytes(b"{")
    await asyncio.sleep(0.2)
    await knows(doors[0], new.text)


async def test_without_the_head_the_copy_holds_for_a_while_also_over_a_restart(head, doors, tmp_path, monkeypatch):
    new = head.keys.create("zed")
    door = doors[0]
    await knows(door, new.text)
    await head.stop()
    await until(lambda: not door.ledger.is_there)
    await door.ask(new.text)
    again = DoorMachine(head, door.folder)
    again.access = Access(Settings(), again.ledger, state=tmp_path)
    await again.ask(new.text)
    for machine in (door, again):
        monkeypatch.setattr(machine.ledger, "_heard_at_s", time.monotonic() - ledger.KEYS_S)
        with pytest.raises(Unavailable, match="too long to know which API keys hold") as refused:
            await machine.come(new.text)
        assert refused.value.retry_after_s
        with pytest.raises(Unavailable):
            machine.access.caller_of(new.key.id)
    await head.start()
    await knows(door, new.text)


@pytest.mark.parametrize("age_s", [ledger.KEYS_S + 1, -60.0])
async def test_an_old_copy_is_not_believed_after_a_restart_nor_is_a_clock_that_was_set_back(head, doors, age_s):
    new = head.keys.create("zed")
    await knows(doors[0], new.text)
    await head.stop()
    heard_s = time.time() - age_s
    os.utime(doors[0].folder / "cluster" / "door", (heard_s, heard_s))
    again = DoorMachine(head, doors[0].folder)
    again.access = Access(Settings(), again.ledger, state=doors[0].folder)
    with pytest.raises(Unavailable):
        await again.come(new.text)


async def test_a_new_door_has_the_keys_before_it_opens(head, tmp_path):
    new = head.keys.create("zed")
    door = DoorMachine(head, tmp_path / "door")
    await asyncio.to_thread(door.ledger.fetch)
    access = Access(Settings(), door.ledger, state=tmp_path)
    assert access.has_usable_keys()
    assert access.books.is_fresh
    assert door.ledger.keys.read() == [new.key]


# --- quotas -----------------------------------------------------------------------------------------------------------


async def test_a_limit_of_requests_is_one_for_all_doors_and_for_the_head(head, doors):
    new = head.keys.create("zed", limits=(Limit(REQUESTS, 60, DAY_S),))
    for door in doors:
        await knows(door, new.text)
    own = Access(Settings(), head.books, state=head.folder)
    n_at_head = 0
    for _ in range(10):
        caller = own.caller(new.key)
        caller.begin("tiny", Lane.DEFAULT)
        caller.leave()
        n_at_head += 1
    let_in = await asyncio.gather(*(door.asks(new.text, 40) for door in doors))
    assert 60 - 2 * 3 <= n_at_head + sum(let_in) <= 60
    with pytest.raises(RateLimited):
        own.caller(new.key).begin("tiny", Lane.DEFAULT)


async def restarted(head: HeadMachine, doors: list[DoorMachine]) -> None:
    await head.stop()
    await until(lambda: not any(door.ledger.is_there for door in doors))
    await head.start()
    await until(lambda: all(door.ledger.is_there for door in doors))


async def test_levels_are_kept_over_the_heads_restart(head, doors):
    new = head.keys.create("zed", limits=(Limit(REQUESTS, 20, DAY_S),))
    await knows(doors[0], new.text)
    n = await doors[0].asks(new.text, 15)
    await restarted(head, doors)
    assert n + await doors[0].asks(new.text, 15) == 20


async def test_requests_that_run_at_a_door_count_on_when_the_head_comes_back(head, doors):
    new = head.keys.create("zed", n_concurrent=2)
    for door in doors:
        await knows(door, new.text)
    running = [await doors[0].come(new.text) for _ in range(2)]
    for caller in running:
        caller.begin("tiny", Lane.DEFAULT)
    await restarted(head, doors)
    with pytest.raises(RateLimited, match="2 requests running"):
        await doors[1].ask(new.text)
    running[0].leave()
    await knows_room(doors[1], new.text)


async def knows_room(door: DoorMachine, text: str) -> None:
    for _ in range(400):
        if await door.asks(text, 1):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("there was no room")


async def test_requests_of_a_door_that_is_lost_do_not_count_for_ever(head, doors, monkeypatch):
    monkeypatch.setattr(state, "LEASE_S", 0.1)
    new = head.keys.create("zed", n_concurrent=1)
    for door in doors:
        await knows(door, new.text)
    await until(lambda: head.books.quota(new.key, 0.0).n_running == 0)
    (await doors[0].come(new.text)).begin("tiny", Lane.DEFAULT)
    with pytest.raises(RateLimited):
        await doors[1].ask(new.text)
    await doors[0].kill()
    await knows_room(doors[1], new.text)


async def test_without_the_head_a_door_lends_no_more_and_counts_on(head, doors):
    free, limited = head.keys.create("free"), head.keys.create("zed", limits=(Limit(REQUESTS, 100, DAY_S),))
    door = doors[0]
    for new in (free, limited):
        await knows(door, new.text)
    await door.ask(limited.text, 7)
    await head.stop()
    await until(lambda: not door.ledger.is_there)
    for _ in range(4):
        await door.ask(limited.text, 7)
    with pytest.raises(Unavailable, match="does not answer") as refused:
        await door.ask(limited.text, 7)
    assert refused.value.retry_after_s
    for _ in range(3):
        await door.ask(free.text, 2)
    await head.start()
    await until(lambda: head.used() == {"free": (3, 6), "zed": (5, 35)})


async def test_a_head_that_hangs_holds_up_the_first_request_alone(head, doors, monkeypatch):
    """Its machine takes connections, and nobody reads them: who waited for an answer each time would serve nobody."""
    monkeypatch.setattr(frames, "SILENCE_S", 0.5)
    new = head.keys.create("zed", limits=(Limit(REQUESTS, 100, DAY_S),))
    await knows(doors[0], new.text)
    await head.stop()
    with socket.create_server(("127.0.0.1", head.port)):
        await until(lambda: not doors[0].ledger.is_there)
        for _ in range(5):
            with contextlib.suppress(Unavailable):
                await doors[0].ask(new.text)
        asked = Mock(wraps=doors[0].ledger.lend)
        monkeypatch.setattr(doors[0].ledger, "lend", asked)
        for _ in range(50):
            with pytest.raises(Unavailable):
                await doors[0].ask(new.text)
            await asyncio.sleep(0.02)
        assert asked.call_count == 0
    await head.start()
    await until(lambda: doors[0].ledger.is_there)
    await doors[0].ask(new.text)


async def test_other_limits_of_a_key_count_at_all_doors_at_once(head, doors):
    new = head.keys.create("zed", limits=(Limit(REQUESTS, 4, DAY_S),))
    for door in doors:
        await knows(door, new.text)
    assert sum([await door.asks(new.text, 9) for door in doors]) == 4
    head.keys.change("zed", lambda key: msgspec.structs.replace(key, limits=(Limit(REQUESTS, 6, 3600.0),)))
    for door in doors:
        await knows_room(door, new.text)
    assert sum([await door.asks(new.text, 9) for door in doors]) == 4
    head.keys.change("zed", lambda key: msgspec.structs.replace(key, limits=()))
    for door in doors:
        await knows_room(door, new.text)
    assert [await door.asks(new.text, 9) for door in doors] == [9, 9]


async def test_clients_that_leave_while_they_wait_take_nothing_with_them(head, doors):
    new = head.keys.create("zed", limits=(Limit(REQUESTS, 20, DAY_S),), n_concurrent=2)
    await knows(doors[0], new.text)
    for _ in range(10):
        waiting = [asyncio.create_task(doors[0].come(new.text)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(one, Caller):
                one.leave()
    await until(lambda: head.books.quota(new.key, 0.0).n_running == 0)
    assert await doors[1].asks(new.text, 1) + await doors[0].asks(new.text, 30) == 20


async def test_a_request_that_wants_no_model_costs_nothing(head, doors):
    new = head.keys.create("zed", limits=(Limit(REQUESTS, 4, DAY_S),), n_concurrent=1)
    await knows(doors[0], new.text)
    for _ in range(9):
        (await doors[0].come(new.text)).leave()
    assert await doors[0].asks(new.text, 6) == 4
    for _ in range(3):  # nor does it need any
        (await doors[0].come(new.text)).leave()


async def test_what_is_left_is_told_by_doors_as_by_one_machine(head, doors):
    new = head.keys.create("zed", limits=(Limit(REQUESTS, 50, DAY_S), Limit(TOKENS, 1000, DAY_S)))
    await knows(doors[0], new.text)
    await doors[0].ask(new.text, 300)
    await doors[0].ask(new.text)
    caller = await doors[0].come(new.text)
    told = dict(caller.headers(Shape.OPENAI))
    caller.leave()
    assert (told[b"x-ratelimit-limit-requests"], told[b"x-ratelimit-remaining-tokens"]) == (b"50", b"700")


# --- use --------------------------------------------------------------------------------------------------------------


async def test_what_all_doors_did_is_in_one_ledger_and_shown_by_each(head, doors):
    new = head.keys.create("zed")
    for n, door in enumerate(doors):
        await knows(door, new.text)
        await door.asks(new.text, 3, n_output=5 + n)
    await until(lambda: head.used() == {"zed": (6, 33)})
    shown = await doors[0].ledger.totals("key", "", "zed")
    assert [(one.name, one.requests, one.output_tokens) for one in shown] == [("zed", 6, 33)]
    await head.stop()
    await until(lambda: not doors[0].ledger.is_there)
    with pytest.raises(Unavailable):
        await doors[0].ledger.totals("key", "", None)


async def test_a_client_that_does_not_wait_for_totals_ends_nobody_elses_line(head, doors):
    for n_turns in range(6):
        asking = asyncio.create_task(doors[0].ledger.totals("key", "", None))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert doors[0].ledger.is_there


async def test_more_than_one_message_of_use_is_told(head, doors, monkeypatch):
    monkeypatch.setattr(ledger, "MAX_SUMS", 3)
    await head.stop()
    for n in range(10):
        doors[0].ledger.usage.write("", [], UsageRecord(f"key{n}", "tiny", 1, 0, 0, n), time.time())
    await head.start()
    await until(lambda: head.used() == {f"key{n}": (1, n) for n in range(10)})


async def test_a_head_that_cannot_write_is_told_again(head, doors, monkeypatch):
    new = head.keys.create("zed")
    await knows(doors[0], new.text)
    with monkeypatch.context() as patched:
        patched.setattr(head.books.usage, "put", Mock(side_effect=OSError(28, "full")))
        await doors[0].asks(new.text, 4, n_output=2)
        await until(lambda: head.books.usage.put.call_count > 2)
        assert head.used() == {}
        await knows(doors[0], new.text)
    await until(lambda: head.used() == {"zed": (4, 8)})


async def test_a_door_whose_own_record_is_damaged_has_the_keys_all_the_same(head, tmp_path):
    (tmp_path / "door" / "cluster").mkdir(parents=True)
    (tmp_path / "door" / "cluster" / "usage.db").write_bytes(b"no database" * 1000)
    new = head.keys.create("zed")
    door = DoorMachine(head, tmp_path / "door")
    await door.start()
    await knows(door, new.text)
    await door.ask(new.text, 3)
    head.keys.revoke("zed")
    await knows(door, new.text, does=False)
    await door.stop()


STEP = st.tuples(
    st.sampled_from(("ask", "ask", "ask", "head killed", "door killed", "line cut", "wait")), st.integers(0, 1)
)


# Where a server closes between a connection and its transport, asyncio leaves both to the collector (Python 3.11).
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(function _SelectorTransport.__del__|socket.socket) :"
    "pytest.PytestUnraisableExceptionWarning"
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=4, max_size=24))
def test_kills_at_any_point_lose_no_use_and_count_none_twice(steps, tmp_path_factory):
    async def work() -> None:
        folder = tmp_path_factory.mktemp("kills")
        head = HeadMachine(folder / "head")
        await head.start()
        new = head.keys.create("zed", limits=(Limit(REQUESTS, 25, DAY_S),))
        doors = [DoorMachine(head, folder / f"door{n}") for n in range(2)]
        for door in doors:
            await door.start()
            await knows(door, new.text)
        n_answers = 0
        for what, n in steps:
            if what == "ask":
                with contextlib.suppress(RateLimited, Unavailable):
                    await doors[n].ask(new.text, 3)
                    n_answers += 1
            elif what == "head killed":
                await head.stop()
                await head.start()
            elif what == "door killed":
                await until(lambda door=doors[n]: door.ledger.is_there)
                await doors[n].kill()
                doors[n] = DoorMachine(head, doors[n].folder)
                await doors[n].start()
            elif what == "line cut":
                doors[n].ledger._line.close()
            else:
                await asyncio.sleep(0.03)
            assert n_answers <= 25
        await until(lambda: head.used().get("zed", (0, 0)) == (n_answers, 3 * n_answers))
        await until(lambda: all(door.ledger.is_there for door in doors))
        for door in doors:
            await door.stop()
        await head.stop()

    asyncio.run(work())


class Killable:
    """A process of `books_process.py`, and what it has said, also before it was killed."""

    def __init__(self, role: str, folder: Path, port: int, key: str = "", seconds_off: int = 0) -> None:
        self._said = folder.with_suffix(".said")
        self._arguments = [role, str(folder), str(port), key, str(seconds_off)]
        self._n_starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, n_requests: int = 10**6) -> None:
        self._n_starts += 1
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.books_process", *self._arguments, str(n_requests)], stdout=said
            )

    def n(self, word: str) -> int:
        return self._said.read_text().split().count(word)

    def is_up(self) -> bool:
        return self.n("up") == self._n_starts

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def eventually(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.slow
def test_processes_that_are_killed_lose_no_use_count_none_twice(tmp_path):
    """One of the doors has a clock that is an hour ahead, the other one an hour behind."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    new = KeyFile(tmp_path / "head").create("zed", limits=(Limit(REQUESTS, 10**6, DAY_S),))
    head = Killable("head", tmp_path / "head", port)
    doors = [Killable("door", tmp_path / f"door{n}", port, new.text, off) for n, off in enumerate((3600, -3600))]
    everybody = [head, *doors]
    try:
        for one in everybody:
            one.start()
        for victim in (0, 1, 2, 0):
            eventually(lambda: all(one.is_up() for one in everybody))
            before = [door.n("done") for door in doors]
            for n, door in enumerate(doors):
                eventually(lambda door=door, before=before[n]: door.n("done") > before + 20)
            everybody[victim].kill()
            everybody[victim].start()
        for door in doors:
            door.kill()
            door.start(0)
        eventually(lambda: all(door.n("told") for door in doors))
    finally:
        for one in everybody:
            one.kill()
    [total] = UsageFile(tmp_path / "head").totals("key")
    own = [UsageFile(tmp_path / f"door{n}" / "cluster").totals("key")[0] for n in range(2)]
    assert total.requests == sum(one.requests for one in own)
    assert total.output_tokens == 3 * total.requests
    for door, one in zip(doors, own, strict=True):
        assert door.n("done") <= one.requests <= door.n("begun") - door.n("refused")


# --- what is deployed -------------------------------------------------------------------------------------------------

ALPHA = Deploy(description=Description(model="alpha", contents="c"), n_replicas=2, wait_s=600.0)


async def test_what_is_deployed_is_known_at_doors_and_deployed_again_by_a_head_that_comes_back(
    head, doors, monkeypatch
):
    await ledger.keep(head.address, "a", ALPHA)
    await until(lambda: doors[0].ledger.models == {"alpha"})
    await head.stop()
    await head.start()
    asked = []

    def ask(deploy: Deploy) -> Iterator[Done]:
        asked.append(deploy)
        if len(asked) < 3:
            raise Unavailable("Ray is not there yet")
        yield Done()

    monkeypatch.setattr(reports, "ask", ask)
    monkeypatch.setattr(state, "DEPLOY_AGAIN_S", 0.01)
    head.state.deploy_again()
    await until(lambda: len(asked) == 3)
    assert {(one.description.model, one.n_replicas, one.wait_s) for one in asked} == {("alpha", 2, 0.0)}
    await ledger.keep(head.address, "a", None)
    await until(lambda: doors[0].ledger.models == frozenset())
    assert head.state.apps == {}


async def test_what_is_taken_back_is_not_deployed_again(head, monkeypatch):
    await ledger.keep(head.address, "a", ALPHA)

    def ask(deploy: Deploy) -> Iterator[Done]:
        head.state.apps = {}
        asked.append(deploy)
        raise Unavailable("Ray is not there yet")

    asked: list[Deploy] = []
    monkeypatch.setattr(reports, "ask", ask)
    monkeypatch.setattr(state, "DEPLOY_AGAIN_S", 0.01)
    head.state._deploy_again()
    assert len(asked) == 1


async def test_nobody_is_told_that_something_is_kept_which_is_not(head, monkeypatch):
    monkeypatch.setattr("localrun.stored.write", Mock(side_effect=OSError(28, "full")))
    with pytest.raises(Unavailable, match="cannot write down what is deployed"):
        await ledger.keep(head.address, "a", ALPHA)
    await head.stop()
    with pytest.raises(Unavailable, match="on the cluster's head"):
        await ledger.keep(head.address, "a", ALPHA)


# --- who is let in ----------------------------------------------------------------------------------------------------


async def test_who_has_not_the_token_or_speaks_otherwise_is_told_so(head):
    with pytest.raises(Unauthorized, match="not the cluster's token"):
        await Line(head.address._replace(token=b"x" * 32)).open()
    line = Line(head.address)
    line._streams = await asyncio.open_connection("127.0.0.1", head.port)
    with pytest.raises(BadRequest, match=r"speaks protocol 2, the head .* 1: update the older one"):
        await line.ask(Knock(protocol=2, version="9", token=TOKEN), News)


async def test_a_copy_of_a_door_is_refused_while_the_other_is_there(head, doors):
    name = (doors[0].folder / "cluster" / "door").read_text()
    with pytest.raises(Conflict, match="is a copy of the other's"):
        await Line(head.address, name).open()
    await doors[0].kill()
    line = Line(head.address, name)
    await until(lambda: name not in head.state._doors)
    await line.open()
    line.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", framing.encode(Look()), framing.encode({"type": "nothing"}),
        framing.encode(Knock(protocol=1, version="", token=b"", running={"a" * 200_000: 1})), b"",
    ],
    ids=["no length", "http", "no knock", "no message", "too long", "nothing"],
)  # fmt: skip
async def test_what_is_no_door_learns_nothing_and_disturbs_nobody(head, doors, sent):
    head.keys.create("zed")
    reader, writer = await asyncio.open_connection("127.0.0.1", head.port)
    writer.write(sent)
    writer.write_eof()
    with contextlib.suppress(ConnectionResetError):
        assert b"salt" not in await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    await doors[0].ledger._look()


async def test_between_machines_it_is_encrypted_and_the_heads_certificate_is_asked_for(tmp_path):
    token = "5a" * cluster_settings.TOKEN_BYTES
    for name, made_of in (("one", token), ("other", "a5" * cluster_settings.TOKEN_BYTES)):
        cluster_settings.make_certificates(tmp_path / name, made_of, "node1", "127.0.0.1")
    head = HeadMachine(tmp_path / "head")
    await head.start(cluster_settings.tls_for_replicas(tmp_path / "one"))
    line = Line(head.address._replace(encryption=cluster_settings.tls_for_doors(tmp_path / "one")))
    await line.open()
    line.close()
    for encryption in (cluster_settings.tls_for_doors(tmp_path / "other"), None):
        with pytest.raises(Unavailable):
            await Line(head.address._replace(encryption=encryption)).open()
    await head.stop()
