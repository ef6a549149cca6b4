"""The workloads, one a file. `WORKLOADS` is the list of them, in the order in which they are run."""

from __future__ import annotations

from localrun.bench.results import Workload
from localrun.bench.workloads import chat, decode, fairness, overload, restart, returning, shared, stall

WORKLOADS: dict[str, Workload] = {
    module.WORKLOAD.name: module.WORKLOAD
    for module in (decode, shared, stall, returning, restart, chat, fairness, overload)
}
