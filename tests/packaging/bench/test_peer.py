from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.compare import Run
from bench.peer import Schedule, alternate
from localrun.bench.results import Options, RunResult, Target, Workload
from localrun.bench.session import INTERRUPTED
from localrun.errors import LocalrunError


class ScriptedServer:
    """Writes down what is done with it. Its memory grows with every run."""

    def __init__(self, name: str, log: list[str], start_problem: str = "") -> None:
        self.name = name
        self.n_restarts = 0
        self.rss = 100
        self._log = log
        self._start_problem = start_problem

    @property
    def target(self) -> Target:
        return Target(self.name, f"http://127.0.0.1:{self.n_restarts}", "m")

    def start(self) -> None:
        if self._start_problem:
            raise LocalrunError(self._start_problem)
        self._log.append(f"start {self.name}")

    def stop(self) -> None:
        self._log.append(f"stop {self.name}")

    def restart(self) -> None:
        self.n_restarts += 1
        self.rss = 10
        self._log.append(f"restart {self.name}")

    def forget(self) -> None:
        self._log.append(f"forget {self.name}")

    def rss_bytes(self) -> int:
        self.rss += 1
        return self.rss


def workload(
    name: str, log: list[str], note: Callable[[Target], str] = lambda _: "", restarts: bool = False
) -> Workload:
    async def run(target: Target, options: Options) -> RunResult:
        log.append(f"{name} {target.name} seed {options.seed}")
        if restarts:
            assert options.restart is not None
            target = await options.restart(target)
        await asyncio.sleep(0)
        return RunResult(
            workload=name, target=target, parameters={}, metrics={"wall_s": 1.0}, records=[], note=note(target)
        )

    return Workload(name, "", run, ("wall_s",))


def schedule(*workloads: Workload, n_rounds: int = 2, is_fresh: bool = False) -> Schedule:
    return Schedule(workloads=workloads, n_rounds=n_rounds, options=Options(seed=7), is_fresh=is_fresh)


def test_servers_take_turns_and_all_get_the_same_prompts_in_a_round():
    log: list[str] = []
    servers = [ScriptedServer("a", log), ScriptedServer("b", log)]
    alternate(servers, schedule(workload("one", log), workload("two", log)), lambda _: None)
    assert log == [
        "start a", "start b",
        "one a seed 7", "one b seed 7", "one a seed 9", "one b seed 9",
        "two a seed 8", "two b seed 8", "two a seed 10", "two b seed 10",
        "stop b", "stop a",
    ]  # fmt: skip


def test_fresh_servers_run_alone_and_empty():
    log: list[str] = []
    servers = [ScriptedServer("a", log), ScriptedServer("b", log)]
    alternate(servers, schedule(workload("one", log), n_rounds=1, is_fresh=True), lambda _: None)
    assert log[:8] == [
        "forget a", "start a", "one a seed 7", "stop a", "forget b", "start b", "one b seed 7", "stop b",
    ]  # fmt: skip


def test_every_run_is_reported_when_it_is_over_with_the_memory_then():
    seen: list[Run] = []
    log: list[str] = []
    runs = alternate([ScriptedServer("a", log)], schedule(workload("one", log)), seen.append).runs
    assert [run.round_index for run in seen] == [0, 1]
    assert [run.result.metrics for run in seen] == [
        {"wall_s": 1.0, "rss_bytes": 101.0},
        {"wall_s": 1.0, "rss_bytes": 102.0},
    ]
    assert runs[: len(seen)] == seen


def test_memory_is_the_highest_of_a_round_and_a_restart_does_not_hide_it():
    log: list[str] = []
    workloads = [workload("one", log), workload("restart", log, restarts=True)]
    runs = alternate([ScriptedServer("a", log), ScriptedServer("b", log)], schedule(*workloads), lambda _: None).runs
    memory = [run for run in runs if run.result.workload == "memory"]
    found = [(run.round_index, run.result.target.name, run.result.metrics["rss_bytes"]) for run in memory]
    assert sorted(found) == [(0, "a", 101.0), (0, "b", 101.0), (1, "a", 102.0), (1, "b", 102.0)]


def test_a_workload_may_restart_its_server_and_sees_where_it_is_then():
    log: list[str] = []
    restarting = schedule(workload("one", log, restarts=True), n_rounds=1)
    runs, problem = alternate([ScriptedServer("a", log)], restarting, lambda _: None)
    assert problem == ""
    assert "restart a" in log
    assert runs[0].result.target.base_url == "http://127.0.0.1:1"


def test_an_interrupted_run_ends_it_and_does_not_count():
    log: list[str] = []
    loads = [workload("one", log), workload("two", log, note=lambda target: INTERRUPTED if target.name == "b" else "")]
    seen: list[Run] = []
    servers = [ScriptedServer("a", log), ScriptedServer("b", log)]
    runs, problem = alternate(servers, schedule(*loads, n_rounds=1), seen.append)
    assert problem == INTERRUPTED
    assert [(run.result.workload, run.result.target.name) for run in seen] == [("one", "a"), ("one", "b"), ("two", "a")]
    assert [run.result.workload for run in runs] == ["one", "one", "two", "memory", "memory"]
    assert log[-2:] == ["stop b", "stop a"]


def test_a_server_that_fails_in_the_middle_does_not_cost_what_was_measured():
    log: list[str] = []

    def fail(target: Target) -> str:
        raise LocalrunError(f"{target.name} is gone")

    loads = [workload("one", log), workload("two", log, note=fail)]
    runs, problem = alternate([ScriptedServer("a", log)], schedule(*loads), lambda _: None)
    assert problem == "a is gone"
    assert [run.result.workload for run in runs] == ["one", "one", "memory", "memory"]
    assert log[-1] == "stop a"


def test_when_nothing_could_be_measured_the_reason_is_raised():
    log: list[str] = []
    interrupted = schedule(workload("one", log, note=lambda _: INTERRUPTED))
    with pytest.raises(KeyboardInterrupt):
        alternate([ScriptedServer("a", log)], interrupted, lambda _: None)
    assert log[-1] == "stop a"


def test_when_one_cannot_be_started_all_are_ended():
    log: list[str] = []
    servers = [ScriptedServer("a", log), ScriptedServer("b", log, "no such model")]
    with pytest.raises(LocalrunError, match="no such model"):
        alternate(servers, schedule(workload("one", log)), lambda _: None)
    assert log == ["start a", "stop b", "stop a"]
