"""`localrun bench`: measure localrun, or any server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localrun import __version__
from localrun.cli import exits
from localrun.cli.bench_report import Reporting, with_reporting
from localrun.cli.connection import base_url, with_settings
from localrun.cli.daemon import daemon_version
from localrun.cli.number_list import NumberList
from localrun.config import Settings

if TYPE_CHECKING:
    from localrun.bench.results import RunResult
    from localrun.bench.roofline import Roofline
    from localrun.bench.session import Session

_POSITIVE = click.FloatRange(min=0, min_open=True)


class _BenchCommand(click.Command):
    """Its words are workloads, except `peer` and `tune` as the first, which are commands of their own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["peer"]:
            from localrun.cli.bench_peer import command as peer

            return peer.make_context(f"{info_name} peer", args[1:], parent=parent, **extra)
        if args[:1] == ["tune"]:
            from localrun.cli.bench_tune import command as tune

            return tune.make_context(f"{info_name} tune", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


# A None is not given: `results.Options` has the defaults, and a localrun daemon says what it holds.
@click.command("bench", cls=_BenchCommand)
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--url", help="The server, such as http://127.0.0.1:8080.")
@click.option("--model", help="The model to ask for: a name, or the path of a GGUF.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="Run all of it so often.")
@click.option("--streams", type=NumberList(), help="decode: numbers of streams. Default: rising.")
@click.option("--seconds", type=_POSITIVE, metavar="N",
              help="Length of chat, of fairness, and of the second part of overload. Default: 20.")  # fmt: skip
@click.option("--rate", "rate_per_s", type=_POSITIVE, metavar="N", help="chat: requests per second. Default: 1.")
@click.option("--burstiness", type=_POSITIVE, metavar="N",
              help="chat: 1 (the default) is a Poisson process, less comes in bursts, more is regular.")  # fmt: skip
@click.option("--ttft-limit", "ttft_limit_s", type=_POSITIVE, metavar="SECONDS",
              help="chat: latest good first token. Default: 2.")  # fmt: skip
@click.option("--itl-limit", "itl_limit_s", type=_POSITIVE, metavar="SECONDS",
              help="chat: slowest good pace, per token. Default: 0.2.")  # fmt: skip
@click.option("--latency", metavar="MODE", help="Ask localrun for this latency: interactive, balanced, throughput, ms.")
@click.option("--lane", type=click.Choice(["interactive", "default", "batch"]), help="Ask localrun for this lane.")
@click.option("--slots", type=click.IntRange(1, 256), help="Slots of the server. Default: as localrun says, or 8.")
@click.option("--kv-cells", type=click.IntRange(min=256),
              help="KV cells of the server. Default: as localrun says, or 32768.")  # fmt: skip
@click.option("--context", "context_tokens", type=click.IntRange(min=256), metavar="TOKENS",
              help="Longest request that the server takes. Default: 4096, or what localrun says if less.")  # fmt: skip
@click.option("--timeout", "request_timeout_s", type=_POSITIVE, metavar="SECONDS",
              help="Give a request up after this. Default: 600.")  # fmt: skip
@click.option("--seed", type=int, help="Seed of prompts and arrivals. Default: a new one, so that nothing is cached.")
@click.option("--verbose", is_flag=True, help="Show every metric.")
@with_reporting
@with_settings
def command(
    names: tuple[str, ...], url: str | None, model: str | None, rounds: int, verbose: bool, reporting: Reporting,
    settings: Settings, **given: Any,
) -> int:  # fmt: skip
    """Measure a server with the WORKLOADs named, or with all of them.

    The server is the one at --url, which may be any that speaks OpenAI's API; else the running daemon; else a daemon
    of its own, with temporary files and, unless a --model is given, a random model of the size of 135M Q4_0. In a
    running daemon the model is the built-in `tiny` unless one is given. Prompts are random tokens.

    \b
    decode     short prompts at rising concurrency, until the knee
    shared     8 requests at once with the same long system prompt
    stall      streams are running when a long prompt arrives
    returning  conversations that together are larger than the KV pool
    restart    a long prompt again, and after a restart of the server
    chat       short chats that arrive by themselves; goodput
    fairness   one client keeps the server full, another asks for little
    overload   many requests at once, then twice the rate that fits

    `localrun bench peer` runs them against localrun and llama-server in turn; `localrun bench tune` finds out how many
    threads are best.
    """
    from localrun.bench.decode_curve import decode_curves
    from localrun.bench.table import table
    from localrun.bench.workloads import WORKLOADS

    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise click.UsageError(f"there is no workload {unknown[0]!r}; the workloads are {', '.join(WORKLOADS)}")
    chosen = [WORKLOADS[name] for name in names or WORKLOADS]
    results: list[RunResult] = []
    is_whole = False
    with ExitStack() as stack:
        session = _session(stack, url, model, settings, given)
        limit = _limit(session, settings, reporting) if WORKLOADS["decode"] in chosen else None
        target = session.target
        _say(f"{target.base_url}, model {target.model}, seed {session.options.seed}; Ctrl-C shows what there is")
        try:
            is_whole = session.run(chosen, rounds, lambda result: _keep(results, result))
        finally:
            # Whatever ended it: measuring took time.
            curves = decode_curves(results, None if limit is None else limit.bound_tokens_per_s)
            print("\n".join([table(results, WORKLOADS, is_verbose=verbose), *reporting.curve_lines(curves)]))
            reporting.write({"localrun": __version__, "curves": curves, "results": results}, curves, results)
    return exits.OK if is_whole else exits.INTERRUPTED


def _session(
    stack: ExitStack, url: str | None, model: str | None, settings: Settings, given: dict[str, Any]
) -> Session:
    """The server to measure, started if need be, and the options: given, or as the server says, or the defaults."""
    from localrun.bench.discover import BUILT_IN, base_url_of, holds_of, model_of
    from localrun.bench.results import Options, Target
    from localrun.bench.session import Session, own_server, random_seed
    from localrun.bench.streams import Endpoint

    options = Options(seed=random_seed())
    options = dataclasses.replace(options, **{name: value for name, value in given.items() if value is not None})
    if url is None and (settings.port == 0 or daemon_version(settings) is None):
        # As Ctrl-C, so that the daemon is ended on the way out.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _say("starting a daemon for this" + ("" if model else ", with a random model of the size of 135M Q4_0"))
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
        raise click.UsageError(f"{base} has several models, or does not list them; name one with --model")
    target = Target("localrun" if url is None else base, base, model)
    asyncio.run(Endpoint(target, options).connect())  # loads the model
    holds = holds_of(base, model)
    if holds is not None:
        context_tokens = min(holds.context_tokens, options.context_tokens)
        said: dict[str, Any] = {"slots": holds.slots, "kv_cells": holds.kv_cells, "context_tokens": context_tokens}
        options = dataclasses.replace(options, **{name: size for name, size in said.items() if given[name] is None})
    return Session(target, options)


def _limit(session: Session, settings: Settings, reporting: Reporting) -> Roofline | None:
    """The bound by memory bandwidth, where the model's file is here, and its memory is main memory or its bandwidth was
    given."""
    from localrun.bench.discover import holds_of
    from localrun.bench.roofline import roofline
    from localrun.processors import usable

    target = session.target
    path = Path(target.model)
    if not path.is_file():
        return None
    if reporting.bandwidth_bytes_per_s is None:
        holds = holds_of(target.base_url, target.model)
        if holds is None or not holds.backend.endswith("CPU"):
            return None
        _say("measuring the memory bandwidth")
    return roofline(path, settings.threads or usable().usual_threads, reporting.bandwidth_bytes_per_s)


def _keep(results: list[RunResult], result: RunResult) -> None:
    results.append(result)
    _say(f"{result.workload}: {result.note or 'done'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
