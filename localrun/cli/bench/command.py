"""`localrun bench`: measure localrun, or any server with OpenAI's API; what a tier saves (`bench tiers`), and how many
threads are best for a model on this machine (`bench tune`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localrun import __version__, config, errors
from localrun.cli import exits
from localrun.cli.arguments import NumberList, with_settings
from localrun.cli.daemon import base_url, daemon_version, ensure_daemon
from localrun.cli.text import columns, print_json, progress, say
from localrun.config import Settings
from localrun.visible import visible

if TYPE_CHECKING:
    from localrun.bench.metrics import CurvePoint
    from localrun.bench.results import RunResult, Workload
    from localrun.bench.roofline import Roofline
    from localrun.bench.session import Session
    from localrun.bench.tiers import TierAnswer
    from localrun.bench.tune import StepTiming, Tuning
    from localrun.hardware.processors import Processors
    from localrun.hardware.thread_choice import Threads


class _Finite(click.FloatRange):
    """A number in a range. FloatRange alone lets infinity and "not a number" pass, and a workload would not end."""

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


POSITIVE = _Finite(min=0, min_open=True)
SHARE = _Finite(min=0, max=1, min_open=True, max_open=True)
_FILE = _NewFile(dir_okay=False, path_type=Path)


def chosen_workloads(names: Sequence[str]) -> list[Workload]:
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
            from localrun.bench.report import latency_ranges, plot

            plot(self.plot_path, curves, latency_ranges(results))

    def curve_lines(self, curves: Mapping[str, Sequence[CurvePoint]]) -> list[str]:
        from localrun.bench.report import curve_tables, decode_chart

        return [*curve_tables(curves, self.hourly_price), *decode_chart(curves)]


def with_price(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options about what a machine costs, and its function the arguments `hourly_price`, in the
    currency of whoever asks, and `watts`."""

    @click.option(
        "--price-per-hour", type=float, help="Price of this machine per hour, for the cost of a million tokens."
    )
    @click.option("--watts", type=float, help="Power that this machine draws; needs --price-per-kwh.")
    @click.option("--price-per-kwh", type=float, help="Price of a kilowatt-hour.")
    @functools.wraps(function)
    def with_options(
        *arguments: Any, price_per_hour: float | None, watts: float | None, price_per_kwh: float | None, **options: Any
    ) -> int:
        from localrun.bench.report import price_per_hour as hourly_price_of

        hourly = hourly_price_of(price_per_hour=price_per_hour, watts=watts, price_per_kwh=price_per_kwh)
        return function(*arguments, hourly_price=hourly, watts=watts, **options)

    return with_options


def with_reporting(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options about what is done with the numbers, and its function the argument `reporting`. What
    cannot work is said at once."""

    @with_price
    @click.option("--bandwidth", type=POSITIVE, metavar="GB/S",
                  help="Bandwidth of the memory that holds the model. Default: main memory, measured.")  # fmt: skip
    @click.option("--json", "json_path", type=_FILE, help="Write everything to this file, with every request.")
    @click.option("--plot", "plot_path", type=_FILE, help="Draw the decode curve and the latencies as a PNG.")
    @functools.wraps(function)
    def with_options(
        *arguments: Any, hourly_price: float | None, watts: float | None, bandwidth: float | None,
        json_path: Path | None, plot_path: Path | None, **options: Any,
    ) -> int:  # fmt: skip

        if plot_path is not None:
            from localrun.bench.report import require_matplotlib

            require_matplotlib()
        reporting = Reporting(
            hourly_price=hourly_price,
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e9,
            json_path=json_path,
            plot_path=plot_path,
        )
        return function(*arguments, reporting=reporting, **options)

    return with_options


STREAMS = (
    "decode, edit, list, json, prose: numbers of streams. Default: doubling until the knee for decode, and 1, 2, 4 and "
    "8 for the others."
)


class Worded(click.Command):
    """Its words are arguments, except for those of `words` as the first, which are commands of their own."""

    words: Mapping[str, click.Command] = {}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.words:
            return self.words[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


# A None is not given: `results.Options` has the defaults, and a localrun daemon says what it holds.
@click.command("bench", cls=Worded)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--url", help="The server to measure, such as http://127.0.0.1:8080.")
@click.option("--model", help="The model to use: a name, or the path of a GGUF.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="How many times to run everything."
)
@click.option("--streams", type=NumberList(), help=STREAMS)
@click.option("--seconds", type=POSITIVE, metavar="N",
              help="Duration of chat, of fairness, and of the second part of overload. Default: 20.")  # fmt: skip
@click.option("--rate", "rate_per_s", type=POSITIVE, metavar="N", help="chat: requests per second. Default: 1.")
@click.option("--burstiness", type=POSITIVE, metavar="N",
              help="chat: 1 (the default) is a Poisson process; lower is burstier, higher more regular.")  # fmt: skip
@click.option("--ttft-limit", "ttft_limit_s", type=POSITIVE, metavar="SECONDS",
              help="chat: longest good time to first token. Default: 2.")  # fmt: skip
@click.option("--itl-limit", "itl_limit_s", type=POSITIVE, metavar="SECONDS",
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
@click.option("--timeout", "request_timeout_s", type=POSITIVE, metavar="SECONDS",
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
    temporary daemon with files of its own. The model is the built-in one, `tiny`, unless --model is given. Prompts are
    random tokens.

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

    `localrun bench tune` finds the best number of threads; `localrun bench tiers` shows what a tier saves.
    """
    from localrun.bench.metrics import decode_curves
    from localrun.bench.report import table
    from localrun.bench.workloads import WORKLOADS

    chosen = chosen_workloads(names)
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
        progress("starting a temporary daemon")
        server = stack.enter_context(
            own_server(
                Path(model or BUILT_IN), slots=options.slots, kv_cells=options.kv_cells,
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
    from localrun.hardware.processors import usable

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


@click.command("tiers")
@click.argument("name")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="How many times to send the whole mix."
)
@click.option("--seed", type=int, help="Seed of the prompts. Default: a new one, so that nothing is cached.")
@click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0),
    help="Price of this machine per hour, for the cost in your currency.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write everything to this file, with every request.")  # fmt: skip
@with_settings
def tiers_command(
    name: str, rounds: int, seed: int | None, price_per_hour: float | None, json_path: Path | None, settings: Settings
) -> int:
    """Measure the tier NAME of the running daemon against its small and its large model alone.

    The mix is 8 short questions, a long text, a question with a tool and one with a schema, and one for each effort
    that the tier has a rule for. Requests are sent one at a time. A tier is a table [tiers.NAME]
    of localrun.toml: one name for a small and a large model.
    """
    from localrun.bench.session import random_seed
    from localrun.bench.tiers import COST_HEADER, SHARE_HEADER, cost_rows, measure, share_rows

    seed = random_seed() if seed is None else seed
    url = ensure_daemon(settings)
    progress(f"{url}, tier {name}, seed {seed}")
    run = measure(url, name, rounds, seed, _show)
    header = COST_HEADER if price_per_hour is None else (*COST_HEADER, "COST")
    print(columns(SHARE_HEADER, share_rows(run)))
    print("\n" + columns(header, cost_rows(run, price_per_hour)))
    print("\nPROMPT to PROBE are tokens. OF LARGE: seconds, compared with the large model alone.")
    print(visible(f"small: {run.tier['small']}, large: {run.tier['large']}"))
    if json_path is not None:
        import msgspec

        json_path.write_bytes(msgspec.json.encode({"localrun": __version__, "seed": seed, "run": run}))
    if run.problems:
        raise errors.LocalrunError(f"requests that one of the three did not answer are left out: {run.problems[0]}")
    return exits.OK


def _show(answer: TierAnswer) -> None:
    if answer.problem:
        progress(f"{answer.asked}, {answer.kind}: {answer.problem}")
        return
    rule = f" ({answer.rule})" if answer.rule else ""
    progress(f"{answer.asked}, {answer.kind}: {answer.model}{rule}, {answer.seconds:.2f} s")


@click.command("tune")
@click.argument("model")
@click.option("--threads", "counts", type=NumberList(), default=(), metavar="N,N,...",
              help="Numbers to try. Default: chosen by the available processors.")  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How many times to measure everything."
)
@click.option("--dry-run", is_flag=True, help="Do not save the result.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def tune_command(model: str, counts: tuple[int, ...], rounds: int, dry_run: bool, as_json: bool) -> int:
    """Measure how many threads are best for MODEL, and save the result for the engines that load it.

    MODEL is a name or the path of a GGUF. Each number of threads computes a prompt of 512 tokens and 1, 4 and 8
    streams, on the CPU.

    An engine tries some numbers by itself when it is idle after its first load; this is more thorough. Run it under the
    limits (container, affinity) that the daemon has, because the result holds for these. Nothing is saved while other
    programs use the processors.
    """
    from localrun.bench.tune import counts_to_try, tune
    from localrun.hardware import thread_choice
    from localrun.hardware.processors import usable
    from localrun.models.storage.store import Store

    settings = config.load({})
    processors = usable()
    found = Store.of(settings).resolve(model)
    tuning = tune(found, processors, counts or counts_to_try(processors), rounds=rounds, on_measured=_show_timing)
    kept_at = config.folders().cache / thread_choice.FILE_NAME
    before = thread_choice.find(kept_at, processors.identity, tuning.build, tuning.shape)
    is_kept = not dry_run and not tuning.is_disturbed
    if is_kept:
        tuning.keep(kept_at, time.time())
    if as_json:
        print_json({"tuning": tuning, "before": before, "kept_at": str(kept_at) if is_kept else None})
    else:
        print("\n".join(_report(tuning, settings, before, kept_at if is_kept else None)))
    return exits.OK


def _report(tuning: Tuning, settings: Settings, before: Threads | None, kept_at: Path | None) -> list[str]:
    processors = tuning.processors
    lines = [*_machine_lines(processors), f"model       {visible(tuning.model)}", "", *_table(tuning).splitlines(), ""]
    best, usual = tuning.best, processors.usual_threads
    if settings.threads:
        now = f"{settings.threads}, because `threads` is set, which overrides measurements"
    elif before is not None:
        now = _words(before) + ", from an earlier measurement"
    else:
        now = f"{usual}, one for each fast core" if not processors.limit else f"{usual}, by the limit"
    lines += [f"best        {_words(best)}", f"until now   {now}"]
    if tuning.is_disturbed:
        lines.append(
            f"disturbed   other programs used {tuning.others:.1f} processors meanwhile; measure again without them"
        )
    if kept_at is None:
        return [*lines, "saved       nothing"]
    return [*lines, f"saved       in {kept_at}; engines use it when they next load the model (`localrun stop`)"]


def _machine_lines(processors: Processors) -> list[str]:
    quota = "none" if processors.quota is None else f"{processors.quota:g} of {processors.n_machine} processors"
    numbers = f"processors {processors.numbers}" if processors.numbers else "all processors"
    return [
        f"processor   {processors.name}: {processors.kinds}",
        f"quota       {quota}",
        f"affinity    {numbers} of {processors.n_machine}",
    ]


def _table(tuning: Tuning) -> str:
    from localrun.bench.tune import STREAMS

    header = ("THREADS", "PROMPT OF 512", *(f"{n} STREAM{'S' if n > 1 else ''}" for n in STREAMS))
    rows = []
    for n_threads in sorted({each.threads for each in tuning.measured}):
        rates = [tuning.tokens_per_s(n_threads, n) for n in STREAMS]
        prompt = tuning.tokens_per_s(n_threads, 1, is_prompt=True)
        rows.append((str(n_threads), f"{prompt:.0f} tok/s", *(f"{rate:.0f} tok/s" for rate in rates)))
    return columns(header, rows)


def _words(threads: Threads) -> str:
    if threads.decode == threads.prompt:
        return f"{threads.decode} for streams and for prompts"
    return f"{threads.decode} for streams, {threads.prompt} for prompts"


def _show_timing(measured: StepTiming) -> None:
    rate = measured.streams * measured.rows / measured.seconds
    what = "a prompt" if measured.rows > 1 else f"{measured.streams} stream{'s' if measured.streams > 1 else ''}"
    progress(f"{measured.threads} threads, {what}: {rate:.0f} tok/s")


bench_command.words = {"tune": tune_command, "tiers": tiers_command}
