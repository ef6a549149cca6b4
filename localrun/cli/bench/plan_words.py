"""The words of `localrun plan` that are no models: calibrate, check, machines and record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.arguments import complete_here, with_settings
from localrun.cli.bench.command import POSITIVE
from localrun.cli.daemon import require_daemon
from localrun.cli.text import print_json, progress, say
from localrun.client import Client
from localrun.config import Settings
from localrun.snapshot import TrafficRow

if TYPE_CHECKING:
    from localrun.models.storage.model import Model
    from localrun.plan.calibration import Calibration

# Of the rate that is carried: where a check is worth most.
CHECKED_LOAD = 0.5


def with_workload(function: Callable[..., int]) -> Callable[..., int]:
    option = click.option(
        "--workload", "workload_name", default="chat", show_default=True, metavar="W",
        help="chat, agent, rag, edit, autocomplete or batch, a TOML file, or a trace.",
    )  # fmt: skip
    return option(function)


def model_and_settings(name: str) -> tuple[Model, Settings]:
    """Raises ModelNotFound, BadRequest or BadModelFile."""
    from localrun.bench.tune import find_model
    from localrun.plan.calibration import settings_for

    settings = config.load({})
    model = find_model(name, settings)
    return model, settings_for(model, settings)


def calibration_of(model: Model, settings: Settings) -> Calibration:
    """What is kept, or else what is measured now."""
    from localrun.plan.calibration import calibrate, kept, path_of

    return kept(path_of(model, settings)) or calibrate(model, settings, progress)


@click.command("calibrate")
@click.argument("name", metavar="MODEL", shell_complete=complete_here)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def calibrate_command(name: str, as_json: bool) -> int:
    """Measure this machine with MODEL, in under a minute.

    What is measured is kept for this machine, this model, this build and these settings. Run it while no other program
    computes. `localrun plan MODEL` does it by itself when there is nothing.
    """
    from localrun.plan import report
    from localrun.plan.calibration import calibrate, path_of

    model, settings = model_and_settings(name)
    calibration = calibrate(model, settings, progress)
    if as_json:
        print_json({"calibration": calibration, "kept_at": str(path_of(model, settings))})
        return exits.OK
    costs = calibration.costs
    streams = ", ".join(f"{n / costs.streams.step_s(n, 256 * n):.3g} with {n}" for n in costs.streams.streams)
    say(f"tokens per second of all streams together, 256 tokens deep: {streams}")
    say(f"prompts: {512 / costs.background.batch_s(512, 0):.3g} tokens per second at their beginning")
    say(f"the daemon: {1e3 * costs.delta_s:.2g} ms a token, {1e3 * costs.request_s:.2g} ms a request")
    say("\n".join(report.basis_lines(calibration)))
    return exits.OK


@click.command("check")
@click.argument("name", metavar="MODEL", shell_complete=complete_here)
@with_workload
@click.option("--rate", "rate_per_s", type=POSITIVE, help="Requests per second. Default: half of what is carried.")
@click.option("--seconds", type=POSITIVE, default=60.0, show_default=True, help="Duration of the real run.")
@click.option("--seed", type=int, default=2, show_default=True, help="Seed of arrivals, lengths and prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def check_command(
    name: str, workload_name: str, rate_per_s: float | None, seconds: float, seed: int, as_json: bool
) -> int:
    """Compare a forecast for MODEL with a real run.

    A daemon of its own answers the same requests as the simulation. The errors are kept, and shown with every later
    forecast for MODEL. Drafts are as the setting `speculation` says.
    """
    from localrun.plan import report
    from localrun.plan.calibration import keep_check, path_of, setup_of
    from localrun.plan.check import compare
    from localrun.plan.search import Search
    from localrun.plan.traces import named

    model, settings = model_and_settings(name)
    workload = named(workload_name)
    calibration = calibration_of(model, settings)
    if rate_per_s is None:
        carried = Search(workload, workload.limits).carries(setup_of(calibration, settings))
        rate_per_s = CHECKED_LOAD * carried.rate_per_s
    found = compare(
        model, settings, calibration, workload, rate_per_s=rate_per_s, seconds=seconds, seed=seed, tell=progress
    )
    keep_check(path_of(model, settings), calibration, found.check)
    if as_json:
        print_json({"real": found.real, "simulated": found.simulated, "check": found.check})
    else:
        print("\n".join(report.comparison_lines(found, workload)))
    return exits.OK


@click.command("machines")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def machines_command(name: str | None, as_json: bool) -> int:
    """List the machines that `--vary machine=...` knows, or show one with the source of each figure.

    They are GPUs, and machines with one memory for all. A processor is not looked up, but calibrated.
    """
    from localrun.bench.report import aligned
    from localrun.plan import report
    from localrun.plan.roofline import device, machines

    known = machines() if name is None else {name: device(name)}
    if as_json:
        print_json(known)
    elif name is not None:
        print("\n".join(report.machine_lines(name, known[name])))
    else:
        rows = [
            [key, f"{each.memory_gb:g} GB", f"{each.gb_per_s:g} GB/s", f"{each.tflops:g} {each.arithmetic}"]
            for key, each in known.items()
        ]
        print("\n".join(aligned(["machine", "memory", "bandwidth", "TFLOPS"], rows)))
    return exits.OK


@click.command("record")
@click.option("--minutes", type=POSITIVE, default=10.0, show_default=True, help="How long; Ctrl-C ends it before.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("traffic.jsonl"),
              show_default=True, metavar="FILE", help="A new file.")  # fmt: skip
@click.option("--model", "model", default="", metavar="MODEL", help="Only what this model is asked.")
@with_settings
def record_command(minutes: float, out: Path, model: str, settings: Settings) -> int:
    """Take down what the running daemon is asked, as a trace for `localrun plan MODEL --workload FILE`.

    A line is when a request came, how long its prompt and its answer were, its lane, and which beginnings and clients
    are the same, under numbers. No text is recorded, nor anything by which one could be guessed.
    """
    from localrun.plan.traces import write

    if out.exists():
        raise click.UsageError(f"{out} is there already; name a new file with --out")
    rows: list[TrafficRow] = []
    url = require_daemon(settings)
    problem = ""
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_take_down(url, minutes, model.removesuffix(":latest"), rows))
    except errors.DaemonUnreachable as error:
        problem = error.message
    if rows:
        write(out, rows)
    if problem:
        say(problem)
    if not rows:
        raise errors.LocalrunError("no request came and ended meanwhile, so nothing was written")
    say(f"{len(rows)} request{'s' if len(rows) > 1 else ''} recorded: localrun plan MODEL --workload {out}")
    return exits.OK


async def _take_down(url: str, minutes: float, model: str, rows: list[TrafficRow]) -> None:
    """Into `rows`, which outlive an end by Ctrl-C."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit, Client(url) as client:

            def begun() -> None:
                limit.reschedule(asyncio.get_running_loop().time() + 60 * minutes)
                progress(f"recording for {minutes:g} minutes; Ctrl-C ends it before")

            async with aclosing(client.traffic(begun)) as traffic:
                async for row in traffic:
                    if model not in ("", row.model):
                        continue
                    rows.append(row)
                    if len(rows).bit_count() == 1:  # more and more seldom
                        progress(f"{len(rows)} so far")
