"""Runs workloads against several servers in turn: A B C, A B C, round after round.

All servers stay up from the first run to the last, as servers do, and idle while another one is measured; `is_fresh`
starts each one anew, alone and with its files removed, for every run. In one round all get the same prompts, and no
prompt comes back in another round or workload, so what should be cold is cold on a warm server too.

Does not: choose servers or workloads, or judge (`compare.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from localrun.bench.compare import Run
from localrun.bench.results import Metrics, Options, RunResult, Target, Workload
from localrun.bench.workloads.workload import INTERRUPTED
from localrun.errors import LocalrunError

RSS = "rss_bytes"
MEMORY = "memory"


class Server(Protocol):
    """What is started, measured and ended: a `ServerProcess`."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> Target: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def restart(self) -> None: ...
    def forget(self) -> None: ...
    def rss_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What to run. `options.seed` is where the seeds of the runs begin."""

    workloads: Sequence[Workload]
    n_rounds: int
    options: Options
    is_fresh: bool = False


class Outcome(NamedTuple):
    """`problem` is why the runs ended before their time, empty when they did not."""

    runs: list[Run]
    problem: str


def alternate(servers: Sequence[Server], schedule: Schedule, on_run: Callable[[Run], None]) -> Outcome:
    """All runs in the order in which they were made, then one named `memory` per server and round.

    Every run gets the metric `rss_bytes`, taken when it had ended; that of `memory` is the highest of the round, as a
    workload that restarts its server leaves a small one behind. `on_run` is called after every run. Servers are ended
    whatever happens. When Ctrl-C, or a server that failed, ends the runs early, those that were complete are returned:
    they took time. Raises LocalrunError, or KeyboardInterrupt, when there are none.
    """
    runs: list[Run] = []
    problem = ""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            if not schedule.is_fresh:
                server.start()
        try:
            for run in _in_turn(servers, schedule):
                runs.append(run)
                on_run(run)
        except (LocalrunError, KeyboardInterrupt) as ended:
            if not runs:
                raise
            problem = str(ended) or INTERRUPTED
    return Outcome(runs + _memory(runs), problem)


def _in_turn(servers: Sequence[Server], schedule: Schedule) -> Iterator[Run]:
    for workload_index, workload in enumerate(schedule.workloads):
        for round_index in range(schedule.n_rounds):
            seed = schedule.options.seed + round_index * len(schedule.workloads) + workload_index
            for server in servers:
                if schedule.is_fresh:
                    server.forget()
                    server.start()
                result = _run(server, workload, replace(schedule.options, seed=seed))
                if result.note == INTERRUPTED:
                    raise KeyboardInterrupt
                if schedule.is_fresh:
                    server.stop()
                yield Run(round_index=round_index, result=result)


def _run(server: Server, workload: Workload, options: Options) -> RunResult:
    async def restart(_: Target) -> Target:
        await asyncio.to_thread(server.restart)
        return server.target

    result = asyncio.run(workload.run(server.target, replace(options, restart=restart)))
    result.metrics[RSS] = float(server.rss_bytes())
    return result


def _memory(runs: Sequence[Run]) -> list[Run]:
    highest: dict[tuple[int, str], Run] = {}
    for run in runs:
        key = (run.round_index, run.result.target.name)
        if key not in highest or run.result.metrics[RSS] > highest[key].result.metrics[RSS]:
            highest[key] = run
    return [_memory_run(run) for run in highest.values()]


def _memory_run(run: Run) -> Run:
    metrics: Metrics = {RSS: run.result.metrics[RSS]}
    result = RunResult(workload=MEMORY, target=run.result.target, parameters={}, metrics=metrics, records=[])
    return Run(round_index=run.round_index, result=result)
