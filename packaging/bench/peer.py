"""Localrun against llama-server: the same workloads, model, slots, KV cells and threads, in turn.

Three servers (ours, llama-server with split KV and with unified KV), and where that is asked for llama-server with
drafts, run every workload alternately, A B C, A B C, round after round. All stay up from the first run to the last, as
servers do, and idle while another one is measured; `is_fresh` starts each one anew, alone and with its files removed,
for every run. In one round all get the same prompts, and no prompt comes back in another round or workload, so what
should be cold is cold on a warm server too. The result is one struct that can be written as JSON and printed by
`report.py`.

Does not: build llama-server (`peer_build.py`), judge (`compare.py`), or print.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from bench.compare import Comparison, Run, Threshold, Verdict, compare, judge
from bench.servers import peer_server
from localrun import __version__
from localrun.bench.metrics import CurvePoint, decode_curves
from localrun.bench.results import Metrics, Options, RunResult, Target, Workload
from localrun.bench.roofline import Roofline
from localrun.bench.servers import NAME, ServerFlags, local_server
from localrun.bench.session import INTERRUPTED
from localrun.errors import LocalrunError
from localrun.hardware.processors import usable

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
    """What to run. `options.seed` is where the seeds of the runs begin. With `peer_drafts` llama-server runs both with
    drafts and without."""

    workloads: Sequence[Workload]
    n_rounds: int
    options: Options
    is_fresh: bool = False
    peer_drafts: bool = False


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


class PeerComparison(msgspec.Struct, kw_only=True):
    """Everything that came out. `environment` are the settings that came with `LOCALRUN_*` variables; `problem`
    is why the runs ended before their time, empty when they did not; `runs` have the record of every request."""

    localrun: str
    processor: str
    flags: ServerFlags
    llama_server: Path
    environment: dict[str, str]
    rounds: int
    problem: str
    bandwidth_bytes_per_s: float
    comparisons: list[Comparison]
    curves: dict[str, list[CurvePoint]]
    verdicts: list[Verdict]
    runs: list[Run]

    @property
    def contenders(self) -> list[str]:
        """Ours first."""
        return list(dict.fromkeys(run.result.target.name for run in self.runs))


def compare_with_peer(
    binary: Path,
    flags: ServerFlags,
    schedule: Schedule,
    folder: Path,
    *,
    thresholds: Sequence[Threshold],
    roofline: Roofline,
    on_run: Callable[[Run], None],
) -> PeerComparison:
    """Runs `schedule` against all servers; their logs and files are in `folder`.

    Raises LocalrunError when a server cannot be started, or fails before the first run is complete.
    """
    servers = [local_server(flags, folder)]
    for drafts in (False, True) if schedule.peer_drafts else (False,):
        servers += [peer_server(binary, flags, folder, is_unified=each, drafts=drafts) for each in (False, True)]
    runs, problem = alternate(servers, schedule, on_run)
    comparisons = compare(runs, NAME)
    return PeerComparison(
        localrun=__version__,
        processor=usable().name,
        flags=flags,
        llama_server=binary,
        environment={name: value for name, value in os.environ.items() if name.startswith("LOCALRUN_")},
        rounds=schedule.n_rounds,
        problem=problem,
        bandwidth_bytes_per_s=roofline.bandwidth_bytes_per_s,
        comparisons=comparisons,
        curves=decode_curves([run.result for run in runs], roofline.bound_tokens_per_s),
        verdicts=judge(comparisons, thresholds),
        runs=runs,
    )
