"""The words of `localrun plan` that are no models: calibrate, check and machines; and what all of them look up."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.arguments import complete_here
from localrun.cli.bench.command import POSITIVE
from localrun.cli.text import print_json, progress, say, tell
from localrun.config import Settings

if TYPE_CHECKING:
    from localrun.bench.arrivals import Workload
    from localrun.models.storage.model import Model
    from localrun.plan.calibration import Calibration

WORDS = ("calibrate", "check", "machines", "record")
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
    try:
        model = find_model(name, settings)
    except (errors.ModelNotFound, errors.BadRequest) as error:
        error.message = _why_no_model(name) or error.message
        raise
    return model, settings_for(model, settings)


def _why_no_model(name: str) -> str:
    """In better words than those of a name that is not found; empty if there are none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return f"{name} is a folder; name the GGUF file in it"
    if path.suffix == ".gguf" and not path.exists():
        return f"{name}: no such file"
    way_out = errors.meant(name, WORDS)
    return f"there is no model '{name}'; {way_out}" if way_out else ""


def workload_of(name: str) -> Workload:
    """Raises BadRequest."""
    from localrun.bench.arrivals import built_in
    from localrun.plan.traces import named

    path = Path(name).expanduser()
    if name not in built_in() and path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise errors.BadRequest(f"--workload {name} is {what}; name a TOML file or a trace", field="workload")
    return named(name)


def calibration_of(model: Model, settings: Settings) -> Calibration:
    """What is kept, or else what is measured now."""
    from localrun.plan.calibration import kept, path_of

    return kept(path_of(model, settings)) or _measured(model, settings)


def _measured(model: Model, settings: Settings) -> Calibration:
    """Raises LocalrunError before anything is measured that could not be kept, and what `calibrate` raises."""
    from localrun.plan import calibration

    path = calibration.path_of(model, settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise errors.LocalrunError(
            f"{path.parent}: {error.strerror or error}, so nothing that is measured could be kept; LOCALRUN_HOME can "
            "name a folder that can be written"
        ) from None
    measured = calibration.calibrate(model, settings, progress)
    with kept_if_possible("this calibration"):
        calibration.keep(path, measured)
    return measured


@contextmanager
def kept_if_possible(what: str) -> Iterator[None]:
    """A result is shown all the same when it cannot be kept."""
    try:
        yield
    except OSError as error:
        tell("warning", f"{what} could not be kept: {error.strerror or error}")


@click.command("calibrate")
@click.argument("name", metavar="MODEL", shell_complete=complete_here)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def calibrate_command(name: str, as_json: bool) -> int:
    """Measure this machine with MODEL, in under a minute.

    What is measured is kept for this machine, this model, this build and these settings. Run it while no other program
    computes. `localrun plan MODEL` does it by itself when there is nothing.
    """
    from localrun.plan import report
    from localrun.plan.calibration import path_of

    model, settings = model_and_settings(name)
    calibration = _measured(model, settings)
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
    from localrun.plan.check import asked_of, compare
    from localrun.plan.search import Search

    model, settings = model_and_settings(name)
    workload = workload_of(workload_name)
    # Before a minute of measuring, where possible.
    sessions = None if rate_per_s is None else asked_of(workload, rate_per_s, seconds, seed)
    calibration = calibration_of(model, settings)
    if rate_per_s is None or sessions is None:
        carried = Search(workload, workload.limits).carries(setup_of(calibration, settings))
        rate_per_s = CHECKED_LOAD * carried.rate_per_s
        sessions = asked_of(workload, rate_per_s, seconds, seed)
    found = compare(model, settings, calibration, workload, sessions, rate_per_s=rate_per_s, seed=seed, tell=progress)
    with kept_if_possible("this check"):
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
