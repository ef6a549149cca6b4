"""Workloads one after the other."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from localrun.access.keys import KeyFile
from localrun.bench.results import Options, RunResult, Target, Workload
from localrun.bench.session import INTERRUPTED, Session, base_url_of, holds_of, model_of, random_seed
from localrun.bench.streams import Endpoint, RequestRefused
from localrun.errors import BadRequest, DaemonUnreachable, LocalrunError
from localrun.snapshot import EngineRow
from tests.bench.conftest import FakeServer
from tests.daemon import running_daemon


def listing(*names: str) -> dict[str, object]:
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


def engine(model: str, kv_cells: int, replica: str = "") -> object:
    row = EngineRow(model=model, pid=1, state="ready", slots=4, kv_cells=kv_cells, n_ctx=2048, backend="llama.cpp CPU")
    row.replica = replica
    return msgspec.to_builtins(row)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("localhost:8080/v1", "http://localhost:8080"),
        ("http://box/api", "http://box/api"),
    ],
)
def test_an_address_is_taken_as_people_write_it(text: str, url: str) -> None:
    assert base_url_of(text) == url


@pytest.mark.parametrize("text", ["ftp://box", "http://", ""])
def test_what_cannot_be_measured_is_said(text: str) -> None:
    with pytest.raises(BadRequest, match=r"http://127\.0\.0\.1:8080"):
        base_url_of(text)


@pytest.mark.parametrize(
    ("names", "model"),
    [(("qwen.gguf",), "qwen.gguf"), (("a", "tiny:latest", "b"), "tiny:latest"), (("a", "b"), None), ((), None)],
)
def test_the_only_model_or_the_built_in_one(server: FakeServer, names: tuple[str, ...], model: str | None) -> None:
    server.pages["/v1/models"] = listing(*names)
    assert model_of(server.url) == model


def test_a_server_that_lists_no_models_says_nothing(server: FakeServer) -> None:
    assert model_of(server.url) is None
    server.pages["/v1/models"] = ["not", "a", "listing"]
    assert model_of(server.url) is None


def test_a_daemon_says_how_much_a_model_holds(server: FakeServer) -> None:
    server.pages["/localrun/v1/snapshot"] = {"engines": [engine("a", 512), engine("b", 1024)]}
    assert holds_of(server.url, "b") == (4, 1024, 2048, "llama.cpp CPU")
    assert holds_of(server.url, "c") is None
    server.pages["/localrun/v1/snapshot"] = {"engines": [engine("/models/a.gguf", 512)]}
    assert holds_of(server.url, "a") == (4, 512, 2048, "llama.cpp CPU")


def test_a_cluster_holds_what_its_nodes_do(server: FakeServer) -> None:
    engines = [engine("a", 512, "1"), engine("a", 512, "2"), engine("b", 256)]
    server.pages["/localrun/v1/snapshot"] = {"engines": engines}
    assert holds_of(server.url, "a") == (8, 1024, 2048, "llama.cpp CPU")
    assert holds_of(server.url, "c") is None
    server.pages["/localrun/v1/snapshot"] = {"engines": [engine("a", 512), engine("a", 512)]}
    assert holds_of(server.url, "a") is None, "for text and for vectors"


def test_another_server_holds_nothing_that_we_know(server: FakeServer) -> None:
    assert holds_of(server.url, "a") is None


def test_nobody_there() -> None:
    with pytest.raises(DaemonUnreachable):
        model_of("http://127.0.0.1:9")


TARGET = Target("t", "http://127.0.0.1:1", "m")


def workload(name: str, note: str = "") -> Workload:
    async def run(target: Target, options: Options) -> RunResult:
        return RunResult(
            workload=name, target=target, parameters={"seed": options.seed}, metrics={}, records=[], note=note
        )

    return Workload(name, "", run, ())


def test_every_run_has_prompts_of_its_own() -> None:
    results: list[RunResult] = []
    session = Session(TARGET, Options(seed=10))
    assert session.run([workload("a"), workload("b")], 2, results.append)
    assert [result.workload for result in results] == ["a", "b", "a", "b"]
    assert [result.parameters["seed"] for result in results] == [10, 11, 12, 13]


def test_an_interrupted_run_is_kept_and_is_the_last() -> None:
    results: list[RunResult] = []
    session = Session(TARGET, Options(seed=10))
    assert not session.run([workload("a"), workload("b", INTERRUPTED), workload("c")], 2, results.append)
    assert [result.workload for result in results] == ["a", "b"]


def test_results_before_an_error_have_been_handed_over() -> None:
    async def failing(target: Target, options: Options) -> RunResult:
        raise LocalrunError("the server is gone")

    results: list[RunResult] = []
    with pytest.raises(LocalrunError, match="gone"):
        Session(TARGET, Options(seed=1)).run([workload("a"), Workload("b", "", failing, ())], 1, results.append)
    assert [result.workload for result in results] == ["a"]


def test_seeds_are_new_every_time() -> None:
    assert len({random_seed() for _ in range(20)}) == 20


def test_a_daemon_that_asks_for_keys_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_daemon() as daemon:
        KeyFile(daemon.home / "data").create("zed")
        with pytest.raises(RequestRefused, match="API key"):
            asyncio.run(Endpoint(Target("", daemon.url, "tiny"), Options(seed=1)).connect())
        assert holds_of(daemon.url, "tiny") is None
        monkeypatch.setenv("LOCALRUN_HOME", str(daemon.home))  # where its local key is
        asyncio.run(Endpoint(Target("", daemon.url, "tiny"), Options(seed=1)).connect())
        assert holds_of(daemon.url, "tiny") is not None
