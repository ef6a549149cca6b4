"""The workloads. `WORKLOADS` is the list of them, in the order in which they are run."""

from __future__ import annotations

from localrun.bench.results import Workload
from localrun.bench.workloads.prompts import AGENT, OUTGROW, RESTART, RETURNING, SHARED, STALL
from localrun.bench.workloads.speculation import EDIT, JSON, LIST, PROSE
from localrun.bench.workloads.throughput import CHAT, DECODE, FAIRNESS, OVERLOAD

_ALL = (
    *(DECODE, SHARED, STALL, OUTGROW, AGENT, RETURNING, RESTART, CHAT, FAIRNESS, OVERLOAD),
    *(EDIT, LIST, JSON, PROSE),
)
WORKLOADS: dict[str, Workload] = {each.name: each for each in _ALL}
