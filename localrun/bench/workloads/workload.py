"""What every workload has around its own part: connecting, the outcome of all requests, and an end by Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from localrun.bench.metrics import outcomes, stream_metrics
from localrun.bench.results import Metrics, Options, Parameter, RunResult, Target, Workload
from localrun.bench.streams import CUT_SHORT, Endpoint

INTERRUPTED = "interrupted"


@dataclass
class WorkloadResult:
    """What a workload's own part returns. `parameters` are the sizes that it used."""

    metrics: Metrics
    parameters: dict[str, Parameter] = field(default_factory=dict)
    note: str = ""


def define(
    name: str,
    summary: str,
    headline: tuple[str, ...],
    measure: Callable[[Endpoint, Options], Awaitable[WorkloadResult]],
    *,
    overloads: bool = False,
) -> Workload:
    """A Workload whose own part is `measure`. When that is cancelled the result has what the finished requests say, and
    INTERRUPTED as its note."""

    async def run(target: Target, options: Options) -> RunResult:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        endpoint = Endpoint(target, options)
        try:
            await endpoint.connect()
            measured = await measure(endpoint, options)
        except asyncio.CancelledError:
            await endpoint.cut_all()
            measured = WorkloadResult(stream_metrics("", endpoint.records), note=INTERRUPTED)
        return RunResult(
            workload=name,
            target=endpoint.target,
            parameters={"seed": options.seed, "wording": endpoint.wording.value, **measured.parameters},
            metrics=measured.metrics | outcomes("", endpoint.records, ignoring=CUT_SHORT),
            records=endpoint.records,
            note=measured.note,
            started_at=started_at,
        )

    return Workload(name, summary, run, headline, overloads)
