"""`localrun bench tune`: how many threads are best for a model on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import config
from localrun.cli import exits
from localrun.cli.arguments import NumberList
from localrun.cli.text import columns, print_json, progress
from localrun.config import Settings
from localrun.hardware import thread_choice
from localrun.visible import visible

if TYPE_CHECKING:
    from localrun.bench.tune import StepTiming, Tuning
    from localrun.hardware.processors import Processors


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
    from localrun.bench.tune import counts_to_try, find_model, tune
    from localrun.hardware.processors import usable

    settings = config.load({})
    processors = usable()
    found = find_model(model, settings)
    tuning = tune(found, processors, counts or counts_to_try(processors), rounds=rounds, on_measured=_show)
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


def _report(
    tuning: Tuning, settings: Settings, before: thread_choice.Threads | None, kept_at: Path | None
) -> list[str]:
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


def _words(threads: thread_choice.Threads) -> str:
    if threads.decode == threads.prompt:
        return f"{threads.decode} for streams and for prompts"
    return f"{threads.decode} for streams, {threads.prompt} for prompts"


def _show(measured: StepTiming) -> None:
    rate = measured.streams * measured.rows / measured.seconds
    what = "a prompt" if measured.rows > 1 else f"{measured.streams} stream{'s' if measured.streams > 1 else ''}"
    progress(f"{measured.threads} threads, {what}: {rate:.0f} tok/s")
