"""`localrun bench tune`: how many threads are best for a model on this machine."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import config, thread_choice
from localrun.cli import exits
from localrun.cli.columns import columns
from localrun.cli.number_list import NumberList
from localrun.config import Settings

if TYPE_CHECKING:
    from localrun.bench.tune import Measured, Tuning
    from localrun.processors import Processors


@click.command("tune")
@click.argument("model", required=False)
@click.option("--threads", "counts", type=NumberList(), default=(), metavar="N,N,...",
              help="Numbers to try. Default: by the processors that may be used.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Measure all of it so often.")
@click.option("--dry-run", is_flag=True, help="Keep nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(model: str | None, counts: tuple[int, ...], rounds: int, dry_run: bool, as_json: bool) -> int:
    """Measure how many threads are best for a MODEL, and keep that for the engines that open it.

    A MODEL is a name or the path of a GGUF. Each number of threads computes a prompt of 512 tokens and 1, 4 and 8
    streams, on the CPU. Without a MODEL, a random one of the size of 135M Q4_0 is measured and nothing is kept.

    An engine tries some numbers by itself when it is idle after its first load; this is more thorough. Run it with the
    limits (container, affinity) that the daemon has: what is kept holds for these. Nothing is kept while other programs
    compute.
    """
    import msgspec

    from localrun.bench.tune import counts_to_try, find_model, tune
    from localrun.models.synthesize import synthesize
    from localrun.processors import usable

    settings = config.load({})
    processors = usable()
    with tempfile.TemporaryDirectory(prefix="localrun-bench-") as folder:
        path = Path(folder, "135m-q4_0.gguf")
        if model is None:
            _say("writing a random 135M Q4_0 model")
            synthesize("135m", "Q4_0", path)
        found = find_model(model or str(path), settings)
        tuning = tune(found, processors, counts or counts_to_try(processors), rounds=rounds, on_measured=_show)
    kept_at = config.folders().cache / thread_choice.FILE_NAME
    before = thread_choice.find(kept_at, processors.identity, tuning.build, tuning.shape)
    is_kept = not dry_run and model is not None and not tuning.is_disturbed
    if is_kept:
        tuning.keep(kept_at, time.time())
    if as_json:
        report = {"tuning": tuning, "before": before, "kept_at": str(kept_at) if is_kept else None}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(_report(tuning, settings, before, kept_at if is_kept else None)))
    return exits.OK


def _report(
    tuning: Tuning, settings: Settings, before: thread_choice.Threads | None, kept_at: Path | None
) -> list[str]:
    processors = tuning.processors
    lines = [*_machine_lines(processors), f"model       {tuning.model}", "", *_table(tuning).splitlines(), ""]
    best, usual = tuning.best, processors.usual_threads
    if settings.threads:
        now = f"{settings.threads}, because `threads` is set, and that comes before what is measured"
    elif before is not None:
        now = _words(before) + ", by an earlier measurement"
    else:
        now = f"{usual}, one for each fast core" if not processors.limit else f"{usual}, by the limit"
    lines += [f"best        {_words(best)}", f"until now   {now}"]
    if tuning.is_disturbed:
        lines.append(f"disturbed   other programs took {tuning.others:.1f} processors meanwhile; measure again without")
    if kept_at is None:
        return [*lines, "kept        nothing"]
    return [*lines, f"kept        in {kept_at}; an engine takes it up when it opens the model (`localrun stop`)"]


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


def _show(measured: Measured) -> None:
    rate = measured.streams * measured.rows / measured.seconds
    what = "a prompt" if measured.rows > 1 else f"{measured.streams} stream{'s' if measured.streams > 1 else ''}"
    _say(f"{measured.threads} threads, {what}: {rate:.0f} tok/s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
