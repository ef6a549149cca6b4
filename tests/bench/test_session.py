"""Workloads one after the other."""

from __future__ import annotations

import pytest

from localrun.bench.results import Options, RunResult, Target, Workload
from localrun.bench.session import Session, random_seed
from localrun.bench.workloads.workload import INTERRUPTED
from localrun.errors import LocalrunError

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
