"""The words of `localrun plan` that are no models: calibrate, check, machines and record; what all of them look up, and
the picture of a forecast.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.arguments import complete_here, with_settings
from localrun.cli.bench.command import POSITIVE
from localrun.cli.daemon import require_daemon
from localrun.cli.text import print_json, progress, say, tell
from localrun.client import Client
from localrun.config import Settings
from localrun.snapshot import TrafficRow

if TYPE_CHECKING:
    from localrun.bench.arrivals import Workload
    from localrun.models.storage.model import Model
    from localrun.plan.calibration import Calibration
    from localrun.plan.search import Point


WORDS = ("calibrate", "check", "machines", "record")
# Of the rate that is carried: where a check is worth most.
CHECKED_LOAD = 0.5


with_workload = click.option(
    "--workload", "workload_name", default="chat", show_default=True, metavar="W",
    help="chat, agent, rag, edit, autocomplete or batch, a TOML file, or a trace.",
)  # fmt: skip


def model_and_settings(name: str) -> tuple[Model, Settings]:
    """Raises ModelNotFound, BadRequest or BadModelFile."""
    from localrun.models.storage.store import Store
    from localrun.plan.calibration import settings_for

    settings = config.load({})
    try:
        model = Store.of(settings).resolve(name)
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


class Picture(click.Path):
    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if Path(str(value)).suffix.lower() != ".png":
            self.fail(f"'{value}' is not the name of a PNG; it ends in .png", param, ctx)
        return Path(str(super().convert(value, param, ctx)))


def try_out(path: Path) -> None:
    """Whether it can be written; its folder is made. Raises NotSupported without matplotlib, and UsageError."""
    from localrun.bench.report import require_matplotlib

    require_matplotlib()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise click.UsageError(f"--plot {path} cannot be written: {error.strerror or error}") from None


def draw(path: Path | None, points: Sequence[Point], knee: Point, title: str) -> int:
    """The exit status: what fails here is told behind a forecast that was shown."""
    from localrun.plan import report

    if path is None:
        return exits.OK
    try:
        report.plot(path, points, knee, title)
    except Exception as error:
        words = error.strerror if isinstance(error, OSError) else None
        tell("error", f"{path} was not drawn: {words or error}")
        return exits.ERROR
    return exits.OK


# What so many clients began with is a system prompt, and nobody's own words.
FEWEST_CLIENTS = 3


@click.command("record")
@click.option("--minutes", type=POSITIVE, default=10.0, show_default=True, help="How long; Ctrl-C ends it before.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("traffic.jsonl"),
              show_default=True, metavar="FILE", help="A new file.")  # fmt: skip
@click.option("--model", "model", default="", metavar="MODEL", help="Only what this model is asked.")
@with_settings
def record_command(minutes: float, out: Path, model: str, settings: Settings) -> int:
    """Take down what the running daemon is asked, as a trace for `localrun plan MODEL --workload FILE`.

    A line is when a request came, how long its prompt and its answer were, its lane, and which beginnings and clients
    are the same, under numbers. No text is recorded. Of prompts of different clients only that is the same which three
    of them began with: whoever sends guesses meanwhile sees in FILE whether one is right if they can be two clients
    more, or can take the name of the client that they guess at. API keys tell clients apart; without keys they are who
    they say.
    """
    from localrun.plan.traces import write

    rows: list[TrafficRow] = []
    others: Counter[str] = Counter()
    url = require_daemon(settings)
    if model:
        asyncio.run(_check(url, model))
    problem = ""
    with _reserved(out):
        try:
            with suppress(KeyboardInterrupt):
                asyncio.run(_take_down(url, minutes, model.removesuffix(":latest"), rows, others))
        except errors.DaemonUnreachable as error:
            problem = error.message
        if rows:
            write(out, apart(rows))
    if problem:
        say(problem)
    left_out = ", ".join(f"{n} for {name}" for name, n in others.most_common())
    if not rows:
        also = f"; for other models than {model} there were {left_out}" if left_out else ""
        raise errors.LocalrunError(f"no request came and ended meanwhile, so nothing was written{also}")
    if left_out:
        say(f"requests for other models were left out: {left_out}")
    say(f"{len(rows)} request{'s' if len(rows) > 1 else ''} recorded: localrun plan MODEL --workload {out}")
    return exits.OK


def apart(rows: Sequence[TrafficRow]) -> list[TrafficRow]:
    """Prompts of different clients have nothing in common but what `FEWEST_CLIENTS` of them began with. Else whoever
    sends guesses would see which of them begins like somebody's prompt, 16 tokens further each time."""
    clients: dict[str, set[str]] = {}
    for row in rows:
        for block in row.blocks:
            clients.setdefault(block, set()).add(row.client)
    return [
        msgspec.structs.replace(row, blocks=[
            block if len(clients[block]) >= FEWEST_CLIENTS else f"{block} of {row.client}" for block in row.blocks
        ])
        for row in rows
    ]  # fmt: skip


@contextmanager
def _reserved(path: Path) -> Iterator[None]:
    """A file that is made at once: what cannot be written is said before the recording, and nobody else takes the name.
    It is gone again if nothing was written. Raises UsageError."""
    if str(path) == "-":
        raise click.UsageError("--out -: a recording is written to a file; name one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise click.UsageError(f"--out {path}: its folder cannot be made; name a file in another one") from None
    try:
        path.open("xb").close()
    except FileExistsError:
        raise click.UsageError(f"{path} is there already; name a new file with --out") from None
    except OSError as error:
        raise click.UsageError(f"--out {path}: {error.strerror}; name a file in another folder") from None
    try:
        yield
    except OSError as error:
        error.filename = str(path)  # and not that of a temporary one
        raise
    finally:
        with suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


async def _check(url: str, model: str) -> None:
    """Raises ModelNotFound."""
    async with Client(url) as client:
        await client.show(model)


async def _take_down(url: str, minutes: float, model: str, rows: list[TrafficRow], others: Counter[str]) -> None:
    """Into `rows`, which outlive an end by Ctrl-C; `others` counts the requests for other models."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit, Client(url) as client:

            def begun() -> None:
                limit.reschedule(asyncio.get_running_loop().time() + 60 * minutes)
                progress(f"recording for {minutes:g} minutes; Ctrl-C ends it before")

            async with aclosing(client.traffic(begun)) as traffic:
                async for row in traffic:
                    if model not in ("", row.model):
                        others[row.model] += 1
                        continue
                    rows.append(row)
                    if len(rows).bit_count() == 1:  # more and more seldom
                        progress(f"{len(rows)} so far")
