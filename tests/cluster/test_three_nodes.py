"""A real cluster of three nodes on this machine, on fake engines: by its commands, and by what its doors' clients get.

All of it is one cluster, which starts once: the tests stand in the order in which a person would do this.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrun import framing
from localrun.cluster import frames, settings
from tests.server.conftest import copies, small_model

__all__ = ["small_model"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-P", "-m", "tests.cluster.fake_cluster")
PATIENCE_S = 600
N_TOKENS = 400


def free_port() -> int:
    """One that nobody is given who asks for any, as Ray's processes do."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(is_so: Callable[[], Any], what: str) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < until_s, f"{what} did not come"
        time.sleep(0.1)
    return found


class Node:
    """`cluster up` or `cluster join`, with a home of its own."""

    def __init__(self, folder: Path, name: str, address: str, models: Path) -> None:
        self.name, self.address, self.port = name, address, free_port()
        self.home = folder / name
        self._log = folder / f"{name}.log"
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith(("LOCALRUN", "RAY"))}
        self.environment |= {
            "PYTHONPATH": str(ROOT), "LOCALRUN_HOME": str(self.home), "LOCALRUN_MODELS": str(models),
            "LOCALRUN_FAKE_STEP_MS": "30", "LOCALRUN_KV_CELLS": "8192", "LOCALRUN_SLOTS": "8",
            "RAY_memory_usage_threshold": "0.01",  # beyond it Ray would kill replicas, if it looked
        }  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, "cluster", *arguments, "--name", self.name, "--address", self.address],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home.parent,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    def says(self, text: str) -> None:
        def said() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log
            return text in self.log

        until(said, f"{self.name}: {text}")

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*PROGRAM, "cluster", *arguments], env=self.environment, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> Any:
        return json.loads(self.run("status", "--json"))

    def engines(self) -> Any:
        """As a door shows them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/localrun/v1/snapshot") as answer:
            return json.load(answer)["engines"]

    def processes(self) -> list[psutil.Process]:
        assert self.process is not None
        own = psutil.Process(self.process.pid)
        return [*own.children(recursive=True), own]

    def kill(self) -> None:
        """As a machine without power."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        assert self.process is not None
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            left = self.processes()
            self.process.terminate()
            self.process.wait(60)
            _, alive = psutil.wait_procs(left, timeout=60)
            for process in alive:
                process.kill()


class Following:
    """The cluster as a node sees it, without another process of Ray for each look."""

    def __init__(self, node: Node) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.cluster.following"], env=node.environment, stdout=subprocess.PIPE
        )
        self._n_seen, self._last = 0, b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last = line
            self._n_seen += 1

    def now(self) -> Any:
        """Of after the call: what is being looked at already may be of before."""
        n_seen = self._n_seen
        until(lambda: self._n_seen > n_seen + 1, "a report")
        return json.loads(self._last)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Cluster:
    def __init__(self, folder: Path, models: Path, *addresses: str) -> None:
        names = ("n1", "n2", "n3")
        self.head, self.second, self.third = (Node(folder, *one, models) for one in zip(names, addresses, strict=True))
        self.head_port = free_port()
        self.following: Following | None = None
        self._clients = ThreadPoolExecutor(32)

    def start(self) -> None:
        self.head.start("up", "--port", str(self.head.port), "--head-port", str(self.head_port))
        self.head.says("localrun is listening")
        self.join(self.second, "--door", "--port", str(self.second.port))
        self.second.says("localrun is listening")
        self.join(self.third)
        self.following = Following(self.second)

    def join(self, node: Node, *arguments: str) -> None:
        token = self.head.home / "state" / "cluster.token"
        node.start("join", f"{self.head.address}:{self.head_port}", "--token-file", str(token), *arguments)
        node.says("of the cluster of")

    def stop(self) -> None:
        if self.following is not None:
            self.following.stop()
        for node in (self.third, self.second, self.head):
            node.stop()
        self._clients.shutdown()

    def streams(self, door: Node, n: int, n_tokens: int = N_TOKENS) -> list[Stream]:
        return [Stream(self._clients, door, f"stream {number}", n_tokens) for number in range(n)]

    def now(self) -> Any:
        assert self.following is not None
        return self.following.now()

    def ready(self, model: str, n: int) -> Any:
        def found() -> Any:
            apps = [app for app in self.now()["apps"] if app["description"]["model"] == model]
            return apps and len([one for one in apps[0]["replicas"] if not one["why_not"]]) >= n and apps[0]

        return until(found, f"{n} replicas of {model}")


class Stream:
    """A client of a door that reads a stream."""

    def __init__(self, clients: ThreadPoolExecutor, door: Node, prompt: str, n_tokens: int) -> None:
        self._body = json.dumps({
            "model": "alpha", "prompt": prompt, "raw": True,
            "options": {"temperature": 0, "num_predict": n_tokens, "ignore_eos": True},
        }).encode()  # fmt: skip
        self._url = f"http://127.0.0.1:{door.port}/api/generate"
        self.n_pieces = 0
        self.result: Future[str] = clients.submit(self._read)

    def _read(self) -> str:
        request = urllib.request.Request(self._url, self._body, {"Content-Type": "application/json"})
        text = ""
        with _opened(request) as answer:
            for line in answer:
                piece = json.loads(line)
                assert "error" not in piece, piece
                text += piece["response"]
                self.n_pieces += 1
        assert piece["done"]
        return text


def _opened(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from None


def texts(streams: list[Stream]) -> list[str]:
    return [stream.result.result(PATIENCE_S) for stream in streams]


@pytest.fixture(scope="module")
def cluster(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    cluster = Cluster(folder, copies(small_model, folder / "models"), "127.0.0.1", "127.0.0.2", "127.0.0.3")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_three_nodes_are_there_and_run_nothing(cluster: Cluster):
    status = cluster.second.status()
    assert {(node["node"], node["state"], node["is_head"]) for node in status["nodes"]} == {
        ("n1", "alive", True), ("n2", "alive", False), ("n3", "alive", False),
    }  # fmt: skip
    assert status["apps"] == []


def test_a_deployed_model_runs_on_as_many_nodes(cluster: Cluster):
    assert "the cluster runs alpha" in cluster.head.run("deploy", "alpha", "--replicas", "2")
    app = cluster.ready("alpha", 2)
    assert len({replica["node"] for replica in app["replicas"]}) == 2
    assert "alpha" in cluster.third.run("status")


def test_both_doors_give_the_same_answers_and_compute_nothing_themselves(cluster: Cluster):
    one = texts(cluster.streams(cluster.head, 3, 20))
    other = texts(cluster.streams(cluster.second, 3, 20))
    assert one == other
    assert all(one)
    for door in (cluster.head, cluster.second):
        assert not [row for row in door.engines() if not row["replica"]]


def test_both_doors_show_the_same_replicas(cluster: Cluster):
    replicas = cluster.ready("alpha", 2)["replicas"]
    assert all(one["row"]["kv_cells"] for one in replicas)
    assert sum(one["row"]["output_tokens_total"] for one in replicas) == 6 * 20
    for door in (cluster.head, cluster.second):
        assert [(row["node"], row["replica"], row["state"]) for row in door.engines()] == [
            (one["node"], one["id"], "ready") for one in replicas
        ]
        with urllib.request.urlopen(f"http://127.0.0.1:{door.port}/metrics") as answer:
            assert ("localrun_node_output_tokens_total{" in answer.read().decode()) == (door is cluster.head)


def test_a_door_whose_bridge_hangs_or_is_gone_chooses_by_itself(cluster: Cluster):
    expected = texts(cluster.streams(cluster.head, 6, 20))
    (bridge,) = [one for one in cluster.head.processes() if "tests.cluster.fake_bridge" in one.cmdline()]
    bridge.suspend()
    assert texts(cluster.streams(cluster.head, 6, 20)) == expected
    bridge.kill()
    assert texts(cluster.streams(cluster.head, 6, 20)) == expected


def test_a_door_has_no_ray_in_it(cluster: Cluster):
    for door in (cluster.head, cluster.second):
        assert door.process is not None
        maps = Path(f"/proc/{door.process.pid}/maps").read_text()
        assert "_raylet" not in maps


def test_scaling_up_leaves_what_runs_alone(cluster: Cluster):
    before = {replica["pid"] for replica in cluster.ready("alpha", 2)["replicas"]}
    cluster.head.run("deploy", "alpha", "--replicas", "3")
    app = cluster.ready("alpha", 3)
    assert before < {replica["pid"] for replica in app["replicas"]}


def test_an_app_is_scaled_by_the_work_that_waits_and_wakes_from_nothing(cluster: Cluster):
    before = {replica["pid"] for replica in cluster.ready("alpha", 3)["replicas"]}
    cluster.head.run("deploy", "alpha", "--min", "3", "--max", "3")
    assert before == {replica["pid"] for replica in cluster.ready("alpha", 3)["replicas"]}

    def n_wanted() -> int:
        wanted: int = cluster.now()["apps"][0]["n_wanted"]
        return wanted

    cluster.head.run("deploy", "alpha", "--min", "0", "--max", "3")
    until(lambda: n_wanted() == 0, "nothing")
    # What comes before a door knows of it is computed by a replica that ends afterwards.
    until(lambda: not cluster.head.engines() and not cluster.second.engines(), "doors without replicas")
    # It wakes at once; what then waits brings more, which go again, in the middle of what is left.
    streams = cluster.streams(cluster.second, 16) + cluster.streams(cluster.head, 16)
    until(lambda: n_wanted() > 1, "more replicas")
    until(lambda: n_wanted() < 2 or all(stream.result.done() for stream in streams), "fewer replicas")
    found = texts(streams)
    assert found[:16] == found[16:]
    assert texts(cluster.streams(cluster.second, 16)) == found[:16]
    cluster.head.run("deploy", "alpha", "--replicas", "3")
    cluster.ready("alpha", 3)


def test_a_replica_that_hangs_is_left_and_replaced(cluster: Cluster):
    expected = texts(cluster.streams(cluster.second, 8))
    streams = cluster.streams(cluster.second, 8)
    until(lambda: all(stream.n_pieces > 3 for stream in streams), "tokens")
    hung = max(cluster.ready("alpha", 3)["replicas"], key=lambda replica: replica["n_running"])["pid"]
    os.kill(hung, signal.SIGSTOP)
    assert texts(streams) == expected
    until(lambda: not psutil.pid_exists(hung), "its end")
    cluster.ready("alpha", 3)


def test_kills_of_replicas_lose_nothing(cluster: Cluster):
    expected = texts(cluster.streams(cluster.head, 8))
    pids = [replica["pid"] for replica in cluster.ready("alpha", 3)["replicas"]]
    streams = cluster.streams(cluster.head, 8)
    for pid in pids[:2]:
        before = [stream.n_pieces for stream in streams]
        # A busy door sends several tokens in one piece.
        until(lambda before=before: sum(s.n_pieces > n + 3 for s, n in zip(streams, before, strict=True)) > 5, "tokens")
        os.kill(pid, signal.SIGKILL)
    assert texts(streams) == expected
    again = {replica["pid"] for replica in cluster.ready("alpha", 3)["replicas"]}
    assert not again & set(pids[:2])


def test_a_node_that_is_killed_loses_nothing_and_comes_back(cluster: Cluster):
    expected = texts(cluster.streams(cluster.second, 8))
    streams = cluster.streams(cluster.second, 8)
    until(lambda: all(stream.n_pieces > 3 for stream in streams), "tokens")
    cluster.third.kill()
    assert texts(streams) == expected
    cluster.join(cluster.third)
    cluster.ready("alpha", 3)
    events = [one["text"] for one in cluster.head.status()["events"]]
    assert {"alpha on n3 is lost", "node n3 is gone", "node n3 joined", "alpha runs on n3"} <= set(events)


def test_a_node_is_drained_under_streams(cluster: Cluster):
    expected = texts(cluster.streams(cluster.head, 6))
    streams = cluster.streams(cluster.head, 6)
    until(lambda: all(stream.n_pieces > 3 for stream in streams), "tokens")
    assert "drained" in cluster.head.run("drain", "n3", "--seconds", "30")
    assert texts(streams) == expected
    # Ray's part of it ends when it is empty.
    assert ("n3", "alive") not in {(node["node"], node["state"]) for node in cluster.now()["nodes"]}


# --- what is refused --------------------------------------------------------------------------------------------------


def listening(node: Node) -> set[tuple[str, int, int]]:
    """Address, port and process of every socket of this node's processes that others can connect to."""
    found = set()
    for process in node.processes():
        try:
            sockets = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        found |= {
            (one.laddr.ip.removeprefix("::ffff:"), one.laddr.port, process.pid)
            for one in sockets
            if one.status == psutil.CONN_LISTEN
        }
    return found


def test_no_port_does_anything_without_the_token(cluster: Cluster):
    import grpc

    head_ports = listening(cluster.head)
    open_ports = head_ports | listening(cluster.second)
    replicas = [one for app in cluster.now()["apps"] for one in app["replicas"]]
    frame_ports = {one["port"] for one in replicas}
    assert len(open_ports) > 6
    refused, other = set(), {}
    for address, port, pid in sorted(open_ports):
        host = "127.0.0.1" if address in ("0.0.0.0", "::", "127.0.0.1") else address
        with grpc.insecure_channel(f"{host}:{port}") as channel:
            for method in (
                "ray.rpc.NodeManagerService/GetNodeStats",
                "ray.serve.ASGIService/HandleRequest",
            ):
                try:
                    channel.unary_unary(f"/{method}")(b"", timeout=3)
                    other[port] = "answered", psutil.Process(pid).cmdline()[:3]
                except grpc.RpcError as error:
                    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                        refused.add(port)
    assert refused
    assert not other
    assert frame_ports.isdisjoint(refused)
    # Of the head, which has a loopback address, others reach Serve's own ports alone.
    outside = {port for address, port, _ in head_ports if not ipaddress.ip_address(address).is_loopback}
    assert outside <= refused
    assert len(outside) <= len(replicas)


def test_frames_are_refused_without_their_token(cluster: Cluster):
    replica = cluster.ready("alpha", 2)["replicas"][0]
    hello = frames.Hello(protocol=frames.PROTOCOL, version="1", token=b"x" * 32, app=replica["fingerprint"])
    with socket.create_connection((replica["host"], replica["port"]), timeout=60) as connection:
        connection.sendall(framing.encode(hello))
        body = framing.read_body(connection.makefile("rb"))
    assert body is not None
    refused = frames.decode_from_replica(body, 0.0)
    assert isinstance(refused, frames.Refused)
    assert refused.code == "unauthorized"


def test_ray_lets_nobody_in_without_the_token(cluster: Cluster):
    program = f"import ray; ray.init(address='127.0.0.1:{cluster.head_port}', log_to_driver=False); print('IN')"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("RAY")}
    environment |= {"HOME": str(cluster.head.home), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "IN" not in done.stdout
    assert done.returncode


# --- and the end ------------------------------------------------------------------------------------------------------


def test_a_model_is_taken_back(cluster: Cluster):
    assert "does not run alpha" in cluster.second.run("deploy", "alpha", "--replicas", "0")
    until(lambda: not cluster.now()["apps"], "the end of alpha")


def test_down_leaves_nothing_behind(cluster: Cluster):
    assert cluster.following is not None
    cluster.following.stop()
    nodes = (cluster.third, cluster.second, cluster.head)
    processes = [process for node in nodes for process in node.processes()]
    for node in nodes:
        reaper = threading.Thread(target=node.process.wait if node.process else None)
        reaper.start()
        node.run("down")
        reaper.join()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert [process.cmdline()[:4] for process in alive] == []
    assert not (cluster.head.home / "state" / "cluster.json").exists()
    assert len((cluster.head.home / "state" / "cluster.token").read_text()) == 2 * settings.TOKEN_BYTES
