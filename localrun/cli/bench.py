"""`localrun bench`: measure localrun, or any server with OpenAI's API; `bench peer` compares it with llama-server."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localrun import __version__, config, errors
from localrun.cli import exits
from localrun.cli.arguments import NumberList, with_settings
from localrun.cli.daemon import base_url, daemon_version
from localrun.cli.text import progress, say
from localrun.config import Settings

if TYPE_CHECKING:
    from localrun.bench.compare import Run
    from localrun.bench.metrics import CurvePoint
    from localrun.bench.peer import PeerComparison
    from localrun.bench.results import RunResult, Workload
    from localrun.bench.roofline import Roofline
    from localrun.bench.session import Session

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Positive(click.FloatRange):
    """A number above 0. FloatRange alone lets infinity and "not a number" pass, and a workload would not end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number that can be reached", param, ctx)
        return number


class _NewFile(click.Path):
    """A file to write when everything is measured; that its folder is there is checked before."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder '{path.absolute().parent}'", param, ctx)
        return path


_POSITIVE = _Positive(min=0, min_open=True)
_FILE = _NewFile(dir_okay=False, path_type=Path)


def _chosen(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, or all of them. Raises click.UsageError."""
    from localrun.bench.workloads import WORKLOADS

    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise click.UsageError(f"unknown workload {unknown[0]!r}; the workloads are {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names or WORKLOADS]


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """`hourly_price` is in the currency of whoever asked; `bandwidth_bytes_per_s` is None when it is to be measured."""

    hourly_price: float | None
    bandwidth_bytes_per_s: float | None
    json_path: Path | None
    plot_path: Path | None

    def write(self, outcome: object, curves: Mapping[str, Sequence[CurvePoint]], results: list[RunResult]) -> None:
        """The files that were asked for."""
        if self.json_path is not None:
            import msgspec

            self.json_path.write_bytes(msgspec.json.encode(outcome, enc_hook=str))
        if self.plot_path is not None:
            from localrun.bench.plot import latency_ranges, plot

            plot(self.plot_path, curves, latency_ranges(results))

    def curve_lines(self, curves: Mapping[str, Sequence[CurvePoint]]) -> list[str]:
        """The decode curves as tables and as a chart."""
        from localrun.bench.report import curve_tables, decode_chart

        return [*curve_tables(curves, self.hourly_price), *decode_chart(curves).splitlines()]


def with_reporting(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options about what is done with the numbers, and its function the argument `reporting`. What
    cannot work is said at once."""

    @click.option(
        "--price-per-hour", type=float, help="Price of this machine per hour, for the cost of a million tokens."
    )
    @click.option("--watts", type=float, help="Power that this machine draws; needs --price-per-kwh.")
    @click.option("--price-per-kwh", type=float, help="Price of a kilowatt-hour.")
    @click.option("--bandwidth", type=_POSITIVE, metavar="GB/S",
                  help="Bandwidth of the memory that holds the model. Default: main memory, measured.")  # fmt: skip
    @click.option("--json", "json_path", type=_FILE, help="Write everything to this file, with every request.")
    @click.option("--plot", "plot_path", type=_FILE, help="Draw the decode curve and the latencies as a PNG.")
    @functools.wraps(function)
    def with_options(
        *arguments: Any, price_per_hour: float | None, watts: float | None, price_per_kwh: float | None,
        bandwidth: float | None, json_path: Path | None, plot_path: Path | None, **options: Any,
    ) -> int:  # fmt: skip
        from localrun.bench.report import price_per_hour as hourly_price_of

        if plot_path is not None:
            from localrun.bench.plot import require_matplotlib

            require_matplotlib()
        reporting = Reporting(
            hourly_price=hourly_price_of(price_per_hour=price_per_hour, watts=watts, price_per_kwh=price_per_kwh),
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e9,
            json_path=json_path,
            plot_path=plot_path,
        )
        return function(*arguments, reporting=reporting, **options)

    return with_options


_STREAMS = (
    "decode, edit, list, json, prose: numbers of streams. Default: doubling until the knee for decode, and 1, 2, 4 and "
    "8 for the others."
)


# --- bench peer ---


def _words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()] if value else []


def _latency(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        config.latency_target_s(value)
    except config.ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command("peer")
@click.option("--workloads", callback=_words, metavar="NAME,NAME,...", help="Workloads to run. Default: all.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each workload.")
@click.option("--model", type=_EXISTING, help="A GGUF. Default: a random 135M Q4_0 model.")
@click.option("--slots", type=click.IntRange(1, 256), default=8, show_default=True, help="Slots of both servers.")
@click.option("--kv-cells", type=click.IntRange(min=256), default=32768, show_default=True,
              help="KV cells of both servers.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Threads of both servers. Default: one per fast core.")
@click.option("--latency", callback=_latency, default="balanced", show_default=True, metavar="MODE",
              help="Latency mode of localrun.")  # fmt: skip
@click.option("--streams", type=NumberList(), default=(), help=_STREAMS)
@click.option("--seconds", type=_POSITIVE, default=20.0, show_default=True,
              help="Duration of the workloads that have one.")  # fmt: skip
@click.option("--rate", type=_POSITIVE, default=1.0, show_default=True,
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
def peer_command(
    workloads: list[str], rounds: int, model: Path | None, slots: int, kv_cells: int, threads: int | None,
    latency: str, streams: tuple[int, ...], seconds: float, rate: float, seed: int | None, fresh: bool,
    peer_drafts: bool, binary: Path | None, require: tuple[str, ...], reporting: Reporting,
) -> int:  # fmt: skip
    """Compare localrun with llama-server on this machine: same model, slots, KV cells and threads.

    llama-server is built once from the llama.cpp source that llama-cpp-python ships, so that both have the same
    kernels; this needs cmake and a C++ compiler. It runs with split and with unified KV, and each metric is compared
    with the better of the two. Runs alternate; ratios are localrun / llama-server, taken within the same round.
    """
    from localrun.bench.compare import parse_threshold
    from localrun.bench.peer import Schedule, compare_with_peer
    from localrun.bench.peer_build import build_folder, build_llama_server
    from localrun.bench.results import Options
    from localrun.bench.roofline import roofline
    from localrun.bench.servers import ServerFlags, model_or_random
    from localrun.bench.session import random_seed
    from localrun.bench.workloads.workload import INTERRUPTED
    from localrun.processors import usable

    chosen = _chosen(workloads)
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
    from localrun.bench.report import comparison_tables, note_lines, verdict_lines
    from localrun.bench.workloads import WORKLOADS

    lines = comparison_tables(outcome.comparisons, WORKLOADS, outcome.contenders)
    lines += reporting.curve_lines(outcome.curves)
    lines += note_lines(run.result for run in outcome.runs)
    return lines + verdict_lines(outcome.verdicts)


def _show_run(run: Run) -> None:
    from localrun.bench.report import shown
    from localrun.bench.workloads import WORKLOADS

    result = run.result
    names = WORKLOADS[result.workload].shown(result.metrics)[:4]
    numbers = ", ".join(f"{name} {shown(name, result.metrics[name])}" for name in names)
    note = f" ({result.note})" if result.note else ""
    progress(f"round {run.round_index + 1} {result.workload}, {result.target.name}: {numbers}{note}")


# --- bench ---


class _BenchCommand(click.Command):
    """Its words are workloads, except `peer`, `tiers` and `tune` as the first, which are commands of their own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["peer"]:
            return peer_command.make_context(f"{info_name} peer", args[1:], parent=parent, **extra)
        if args[:1] == ["tune"]:
            from localrun.cli.bench_tune import tune_command

            return tune_command.make_context(f"{info_name} tune", args[1:], parent=parent, **extra)
        if args[:1] == ["tiers"]:
            from localrun.cli.bench_tiers import tiers_command

            return tiers_command.make_context(f"{info_name} tiers", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


# A None is not given: `results.Options` has the defaults, and a localrun daemon says what it holds.
@click.command("bench", cls=_BenchCommand)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--url", help="The server to measure, such as http://127.0.0.1:8080.")
@click.option("--model", help="The model to use: a name, or the path of a GGUF.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="How many times to run everything."
)
@click.option("--streams", type=NumberList(), help=_STREAMS)
@click.option("--seconds", type=_POSITIVE, metavar="N",
              help="Duration of chat, of fairness, and of the second part of overload. Default: 20.")  # fmt: skip
@click.option("--rate", "rate_per_s", type=_POSITIVE, metavar="N", help="chat: requests per second. Default: 1.")
@click.option("--burstiness", type=_POSITIVE, metavar="N",
              help="chat: 1 (the default) is a Poisson process; lower is burstier, higher more regular.")  # fmt: skip
@click.option("--ttft-limit", "ttft_limit_s", type=_POSITIVE, metavar="SECONDS",
              help="chat: longest good time to first token. Default: 2.")  # fmt: skip
@click.option("--itl-limit", "itl_limit_s", type=_POSITIVE, metavar="SECONDS",
              help="chat: longest good time per token. Default: 0.2.")  # fmt: skip
@click.option(
    "--latency", metavar="MODE", help="Latency to ask localrun for: interactive, balanced, throughput, or milliseconds."
)
@click.option("--lane", type=click.Choice(["interactive", "default", "batch"]), help="Lane to ask localrun for.")
@click.option("--slots", type=click.IntRange(1, 256), help="Slots of the server. Default: what localrun reports, or 8.")
@click.option("--kv-cells", type=click.IntRange(min=256),
              help="KV cells of the server. Default: what localrun reports, or 32768.")  # fmt: skip
@click.option("--context", "context_tokens", type=click.IntRange(min=256), metavar="TOKENS",
              help="Longest request the server accepts. Default: 4096, or less if localrun reports less.")  # fmt: skip
@click.option("--timeout", "request_timeout_s", type=_POSITIVE, metavar="SECONDS",
              help="Give up on a request after this. Default: 600.")  # fmt: skip
@click.option("--seed", type=int, help="Seed of prompts and arrivals. Default: a new one, so that nothing is cached.")
@click.option("--verbose", is_flag=True, help="Show every metric.")
@with_reporting
@with_settings
def bench_command(
    names: tuple[str, ...], url: str | None, model: str | None, rounds: int, verbose: bool, reporting: Reporting,
    settings: Settings, **given: Any,
) -> int:  # fmt: skip
    """Measure a server with the given WORKLOADs, or with all of them.

    The server is the one at --url, which can be any server with OpenAI's API; otherwise the running daemon; otherwise a
    temporary daemon with files of its own. The running daemon is measured with the built-in model `tiny`, a temporary
    one with a random model of 135M parameters in Q4_0, unless --model is given. Prompts are random tokens.

    \b
    decode     short prompts at rising concurrency, until the knee
    shared     8 requests at once with the same long system prompt
    stall      a long prompt arrives while streams are running
    outgrow    prompts that are longer than a slot's share of the cells
    agent      one long conversation of many turns, then two at once
    returning  conversations that together exceed the KV pool
    restart    the same long prompt again, then after a server restart
    chat       short chats that arrive independently; goodput
    fairness   one client keeps the server full, another asks for little
    overload   many requests at once, then arrivals at twice that rate
    edit       a Python file with one name changed, with and without drafts
    list       a list again, with and without drafts
    json       records in the form of a schema, with and without drafts
    prose      stories, where drafts must cost nothing

    The exit code is 1 if a request of a workload other than overload did not complete.

    `localrun bench peer` runs them against localrun and llama-server in turn; `localrun bench tune` finds the best
    number of threads; `localrun bench tiers` shows what a tier saves.
    """
    from localrun.bench.metrics import decode_curves
    from localrun.bench.report import table
    from localrun.bench.workloads import WORKLOADS

    chosen = _chosen(names)
    results: list[RunResult] = []
    is_whole = False
    with ExitStack() as stack:
        session = _session(stack, url, model, settings, given)
        limit = _limit(session, settings, reporting) if WORKLOADS["decode"] in chosen else None
        target = session.target
        progress(
            f"{target.base_url}, model {target.model}, seed {session.options.seed}; Ctrl-C shows the results so far"
        )
        try:
            is_whole = session.run(chosen, rounds, lambda result: _keep(results, result))
        finally:
            # Whatever ended it: measuring took time.
            curves = decode_curves(results, None if limit is None else limit.bound_tokens_per_s)
            say("\n".join([table(results, WORKLOADS, is_verbose=verbose), *reporting.curve_lines(curves)]))
            reporting.write({"localrun": __version__, "curves": curves, "results": results}, curves, results)
    if not is_whole:
        return exits.INTERRUPTED
    lost = dict.fromkeys(
        result.workload
        for result in results
        if result.metrics["completion_ratio"] < 1 and not WORKLOADS[result.workload].overloads
    )
    if lost:
        raise errors.LocalrunError(f"not all requests of {', '.join(lost)} completed; the times are of those that did")
    return exits.OK


def _session(
    stack: ExitStack, url: str | None, model: str | None, settings: Settings, given: dict[str, Any]
) -> Session:
    """The server to measure, started if need be, and the options: given, or as the server says, or the defaults."""
    import msgspec

    from localrun.bench.results import Options, Target
    from localrun.bench.session import BUILT_IN, Session, base_url_of, holds_of, model_of, own_server, random_seed
    from localrun.bench.streams import Endpoint

    options = Options(seed=random_seed())
    options = dataclasses.replace(options, **{name: value for name, value in given.items() if value is not None})
    if url is None and (settings.port == 0 or daemon_version(settings) is None):
        # As Ctrl-C, so that the daemon is ended on the way out.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        progress("starting a temporary daemon" + ("" if model else ", with a random 135M Q4_0 model"))
        server = stack.enter_context(
            own_server(
                Path(model) if model else None, slots=options.slots, kv_cells=options.kv_cells,
                threads=settings.threads, latency=options.latency or settings.latency,
            )
        )  # fmt: skip
        return Session(server.target, options, server)
    base = base_url(settings) if url is None else base_url_of(url)
    model = model or (BUILT_IN if url is None else model_of(base))
    if model is None:
        raise click.UsageError(f"{base} has several models, or does not list any; choose one with --model")
    target = Target("localrun" if url is None else base, base, model)
    asyncio.run(Endpoint(target, options).connect())  # loads the model
    holds = holds_of(base, model)
    if holds is not None:
        target = msgspec.structs.replace(target, can_switch=True)
        context_tokens = min(holds.context_tokens, options.context_tokens)
        said: dict[str, Any] = {"slots": holds.slots, "kv_cells": holds.kv_cells, "context_tokens": context_tokens}
        options = dataclasses.replace(options, **{name: size for name, size in said.items() if given[name] is None})
    return Session(target, options)


def _limit(session: Session, settings: Settings, reporting: Reporting) -> Roofline | None:
    """The bound by memory bandwidth, where the model's file is here, and its memory is main memory or its bandwidth was
    given."""
    from localrun.bench.roofline import roofline
    from localrun.bench.session import holds_of
    from localrun.processors import usable

    target = session.target
    path = Path(target.model)
    if not path.is_file():
        return None
    if reporting.bandwidth_bytes_per_s is None:
        holds = holds_of(target.base_url, target.model)
        if holds is None or not holds.backend.endswith("CPU"):
            return None
        progress("measuring the memory bandwidth")
    return roofline(path, settings.threads or usable().usual_threads, reporting.bandwidth_bytes_per_s)


def _keep(results: list[RunResult], result: RunResult) -> None:
    results.append(result)
    progress(f"{result.workload}: {result.note or 'done'}")
