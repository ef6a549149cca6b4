"""`localrun bench peer`: the same workloads against localrun and llama-server, in turn."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.bench_report import Reporting, with_reporting
from localrun.cli.number_list import NumberList

if TYPE_CHECKING:
    from localrun.bench.compare import Run
    from localrun.bench.peer import PeerComparison

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


def _words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()] if value else []


def _latency(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        config.latency_target_s(value)
    except config.ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command("peer")
@click.option("--workloads", callback=_words, metavar="NAME,NAME,...", help="Which workloads. Default: all.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each workload.")
@click.option("--model", type=_EXISTING, help="A GGUF. Default: a synthesized 135M Q4_0.")
@click.option("--slots", type=click.IntRange(1, 256), default=8, show_default=True, help="Slots of both servers.")
@click.option("--kv-cells", type=click.IntRange(min=256), default=32768, show_default=True,
              help="KV cells of both servers.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Threads of both servers. Default: the fast cores.")
@click.option("--latency", callback=_latency, default="balanced", show_default=True, metavar="MODE",
              help="Latency mode of localrun.")  # fmt: skip
@click.option("--streams", type=NumberList(), default=(), help="decode: numbers of streams. Default: rising.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=20.0, show_default=True,
              help="Length of the workloads that have one.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="chat: requests per second.")  # fmt: skip
@click.option("--seed", type=int, help="Seed of prompts and arrivals. Default: a new one.")
@click.option("--fresh", is_flag=True, help="Start every server anew, alone and empty, for every run.")
@click.option("--server", "binary", type=_EXISTING, help="A llama-server that you have. Default: build one.")
@click.option("--require", multiple=True, metavar="WORKLOAD:METRIC<=RATIO",
              help="Fail unless the median ratio is so (<= or >=). Repeatable.")  # fmt: skip
@with_reporting
def command(
    workloads: list[str], rounds: int, model: Path | None, slots: int, kv_cells: int, threads: int | None,
    latency: str, streams: tuple[int, ...], seconds: float, rate: float, seed: int | None, fresh: bool,
    binary: Path | None, require: tuple[str, ...], reporting: Reporting,
) -> int:  # fmt: skip
    """Compare localrun with llama-server on this machine: same model, slots, KV cells and threads.

    llama-server is built once from the llama.cpp source that llama-cpp-python ships (cmake and a C++ compiler are
    needed), so that both have the same kernels. It runs with split and with unified KV, and each metric is compared
    with the better of the two. Runs alternate; ratios are localrun / llama-server, of runs of the same round.
    """
    from localrun.bench.alternation import Schedule
    from localrun.bench.compare import parse_threshold
    from localrun.bench.peer import compare_with_peer
    from localrun.bench.peer_build import build_folder, build_llama_server
    from localrun.bench.results import Options
    from localrun.bench.roofline import roofline
    from localrun.bench.server_flags import ServerFlags
    from localrun.bench.session import random_seed
    from localrun.bench.workloads import WORKLOADS
    from localrun.bench.workloads.workload import INTERRUPTED
    from localrun.models.synthesize import synthesize
    from localrun.processors import usable

    unknown = [name for name in workloads if name not in WORKLOADS]
    if unknown:
        raise click.UsageError(f"there is no workload {unknown[0]!r}; the workloads are {', '.join(WORKLOADS)}")
    thresholds = [parse_threshold(text) for text in require]
    # Servers must be ended on the way out, which the default action would not do.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    binary = (binary or build_llama_server(build_folder(), _progress)).absolute()
    n_threads = threads or usable().usual_threads
    with tempfile.TemporaryDirectory(prefix="localrun-bench-") as folder:
        path = model or Path(folder, "135m-q4_0.gguf")
        if model is None:
            _progress("writing a random 135M Q4_0 model")
            synthesize("135m", "Q4_0", path)
        flags = ServerFlags(model=path.absolute(), slots=slots, kv_cells=kv_cells, threads=n_threads, latency=latency)
        limit = roofline(path, n_threads, reporting.bandwidth_bytes_per_s)
        options = Options(
            seed=random_seed() if seed is None else seed, streams=streams, slots=slots, kv_cells=kv_cells,
            # llama-server with split KV gives each slot its part, and ours stops where the model's training did.
            context_tokens=min(kv_cells // slots, limit.header.n_ctx_train), seconds=seconds, rate_per_s=rate,
        )  # fmt: skip
        _progress(f"memory bandwidth {limit.bandwidth_bytes_per_s / 1e9:.1f} GB/s, seed {options.seed}")
        chosen = [WORKLOADS[name] for name in workloads or WORKLOADS]
        schedule = Schedule(workloads=chosen, n_rounds=rounds, options=options, is_fresh=fresh)
        outcome = compare_with_peer(
            binary, flags, schedule, Path(folder), thresholds=thresholds, roofline=limit, on_run=_show_run
        )
    print("\n".join(_report(outcome, reporting)))
    reporting.write(outcome, outcome.curves, [run.result for run in outcome.runs])
    if outcome.problem == INTERRUPTED:
        return exits.INTERRUPTED
    if outcome.problem:
        raise errors.LocalrunError(f"ended early, the above is what was complete: {outcome.problem}")
    return exits.OK if all(verdict.is_met for verdict in outcome.verdicts) else exits.ERROR


def _report(outcome: PeerComparison, reporting: Reporting) -> list[str]:
    from localrun.bench.peer import CONTENDERS
    from localrun.bench.report import comparison_tables, note_lines, verdict_lines
    from localrun.bench.workloads import WORKLOADS

    lines = comparison_tables(outcome.comparisons, WORKLOADS, CONTENDERS)
    lines += reporting.curve_lines(outcome.curves)
    lines += note_lines(run.result for run in outcome.runs)
    return lines + verdict_lines(outcome.verdicts)


def _show_run(run: Run) -> None:
    from localrun.bench.table import shown
    from localrun.bench.workloads import WORKLOADS

    result = run.result
    names = WORKLOADS[result.workload].shown(result.metrics)[:4]
    numbers = ", ".join(f"{name} {shown(name, result.metrics[name])}" for name in names)
    note = f" ({result.note})" if result.note else ""
    _progress(f"round {run.round_index + 1} {result.workload}, {result.target.name}: {numbers}{note}")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
