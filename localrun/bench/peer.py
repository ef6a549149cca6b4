"""Localrun against llama-server: the same workloads, model, slots, KV cells and threads, in turn.

Puts the parts together: three servers (ours, llama-server with split KV and with unified KV), alternated runs,
comparison, the bound. The result is one struct that can be written as JSON and printed by `report.py`.

Does not: build llama-server (`peer_build.py`), or print.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from localrun.bench.alternation import Schedule, alternate
from localrun.bench.compare import Comparison, Run, Threshold, Verdict, compare, judge
from localrun.bench.decode_curve import CurvePoint, decode_curves
from localrun.bench.local_server import NAME, local_server
from localrun.bench.peer_server import SPLIT_NAME, UNIFIED_NAME, peer_server
from localrun.bench.roofline import Roofline
from localrun.bench.server_flags import ServerFlags

CONTENDERS = (NAME, SPLIT_NAME, UNIFIED_NAME)


class PeerComparison(msgspec.Struct, kw_only=True):
    """Everything that came out. `environment` are the settings that came with `LOCALRUN_*` variables; `problem`
    is why the runs ended before their time, empty when they did not; `runs` have the record of every request."""

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
    """Runs `schedule` against all three servers; their logs and files are in `folder`.

    Raises LocalrunError when a server cannot be started, or fails before the first run is complete.
    """
    servers = [
        local_server(flags, folder),
        peer_server(binary, flags, folder, is_unified=False),
        peer_server(binary, flags, folder, is_unified=True),
    ]
    runs, problem = alternate(servers, schedule, on_run)
    comparisons = compare(runs, NAME)
    return PeerComparison(
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
