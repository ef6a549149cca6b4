"""Compares localrun with llama-server on this machine: `make bench-peer`, or `PYTHONPATH=packaging python -m bench`."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import click

from bench.compare import Run, parse_threshold
from bench.peer import PeerComparison, Schedule, compare_with_peer
from bench.peer_build import build_folder, build_llama_server
from bench.servers import model_or_random
from bench.tables import comparison_tables, note_lines, verdict_lines
from localrun import config, errors
from localrun.bench.report import shown
from localrun.bench.results import Options
from localrun.bench.roofline import roofline
from localrun.bench.servers import ServerFlags
from localrun.bench.session import INTERRUPTED, random_seed
from localrun.bench.workloads import WORKLOADS
from localrun.cli import exits
from localrun.cli.arguments import NumberList
from localrun.cli.bench.command import POSITIVE, STREAMS, Reporting, chosen_workloads, with_reporting
from localrun.cli.text import progress, say
from localrun.hardware.processors import usable

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


def _words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()] if value else []


def _latency(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        config.latency_target_s(value)
    except config.ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command()
@click.option("--workloads", callback=_words, metavar="NAME,NAME,...", help="Workloads to run. Default: all.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each workload.")
@click.option("--model", type=_EXISTING, help="A GGUF. Default: a random 135M Q4_0 model.")
@click.option("--slots", type=click.IntRange(1, 256), default=8, show_default=True, help="Slots of both servers.")
@click.option("--kv-cells", type=click.IntRange(min=256), default=32768, show_default=True,
              help="KV cells of both servers.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Threads of both servers. Default: one per fast core.")
@click.option("--latency", callback=_latency, default="balanced", show_default=True, metavar="MODE",
              help="Latency mode of localrun.")  # fmt: skip
@click.option("--streams", type=NumberList(), default=(), help=STREAMS)
@click.option("--seconds", type=POSITIVE, default=20.0, show_default=True,
              help="Duration of the workloads that have one.")  # fmt: skip
@click.option("--rate", type=POSITIVE, default=1.0, show_default=True,
              help="chat: requests per second.")  # fmt: skip
@click.option("--seed", type=int, help="Seed of prompts and arrivals. Default: a new one.")
@click.option(
    "--fresh", is_flag=True, help="Start each server afresh for every run, alone and with no files from earlier runs."
)
@click.option(
    "--spec-default", "peer_drafts", is_flag=True, help="Also measure llama-server with its flag of this name."
)
@click.option("--server", "binary", type=_EXISTING, help="An existing llama-server. Default: build one.")
@click.option("--require", multiple=True, metavar="WORKLOAD:METRIC<=RATIO",
              help="Fail unless the median ratio meets this limit (<= or >=). Repeatable.")  # fmt: skip
@with_reporting
def main(
    workloads: list[str], rounds: int, model: Path | None, slots: int, kv_cells: int, threads: int | None,
    latency: str, streams: tuple[int, ...], seconds: float, rate: float, seed: int | None, fresh: bool,
    peer_drafts: bool, binary: Path | None, require: tuple[str, ...], reporting: Reporting,
) -> int:  # fmt: skip
    """Compare localrun with llama-server on this machine: same model, slots, KV cells and threads.

    llama-server is built once from the llama.cpp source that llama-cpp-python ships, so that both have the same
    kernels; this needs cmake and a C++ compiler. It runs with split and with unified KV, and each metric is compared
    with the better of the two. Runs alternate; ratios are localrun / llama-server, taken within the same round.
    """
    chosen = chosen_workloads(workloads)
    thresholds = [parse_threshold(text) for text in require]
    # Servers must be ended on the way out, which the default action would not do.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    binary = (binary or build_llama_server(build_folder(), say)).absolute()
    n_threads = threads or usable().usual_threads
    with tempfile.TemporaryDirectory(prefix="localrun-bench-") as folder:
        if model is None:
            progress("writing a random 135M Q4_0 model")
        path = model_or_random(model, Path(folder))
        flags = ServerFlags(model=path.absolute(), slots=slots, kv_cells=kv_cells, threads=n_threads, latency=latency)
        limit = roofline(path, n_threads, reporting.bandwidth_bytes_per_s)
        options = Options(
            seed=random_seed() if seed is None else seed, streams=streams, slots=slots, kv_cells=kv_cells,
            # llama-server with split KV gives each slot its part, and ours stops where the model's training did.
            context_tokens=min(kv_cells // slots, limit.header.n_ctx_train), seconds=seconds, rate_per_s=rate,
        )  # fmt: skip
        progress(f"memory bandwidth {limit.bandwidth_bytes_per_s / 1e9:.1f} GB/s, seed {options.seed}")
        schedule = Schedule(workloads=chosen, n_rounds=rounds, options=options, is_fresh=fresh, peer_drafts=peer_drafts)
        outcome = compare_with_peer(
            binary, flags, schedule, Path(folder), thresholds=thresholds, roofline=limit, on_run=_show_run
        )
    say("\n".join(_report(outcome, reporting)))
    reporting.write(outcome, outcome.curves, [run.result for run in outcome.runs])
    if outcome.problem == INTERRUPTED:
        return exits.INTERRUPTED
    if outcome.problem:
        raise errors.LocalrunError(f"ended early; the runs above are complete: {outcome.problem}")
    return exits.OK if all(verdict.is_met for verdict in outcome.verdicts) else exits.ERROR


def _report(outcome: PeerComparison, reporting: Reporting) -> list[str]:
    lines = comparison_tables(outcome.comparisons, WORKLOADS, outcome.contenders)
    lines += reporting.curve_lines(outcome.curves)
    lines += note_lines(run.result for run in outcome.runs)
    return lines + verdict_lines(outcome.verdicts)


def _show_run(run: Run) -> None:
    result = run.result
    names = WORKLOADS[result.workload].shown(result.metrics)[:4]
    numbers = ", ".join(f"{name} {shown(name, result.metrics[name])}" for name in names)
    note = f" ({result.note})" if result.note else ""
    progress(f"round {run.round_index + 1} {result.workload}, {result.target.name}: {numbers}{note}")


if __name__ == "__main__":
    try:
        sys.exit(main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except errors.LocalrunError as error:
        sys.exit(f"error: {error.message}")
