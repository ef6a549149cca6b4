"""`localrun plan`: how many users a machine carries, what breaks first, and what a change would bring."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.arguments import complete_here
from localrun.cli.bench.command import POSITIVE, with_price
from localrun.cli.text import print_json, progress, say
from localrun.config import KV_TYPES, Settings

if TYPE_CHECKING:
    from localrun.models.storage.model import Model
    from localrun.plan.calibration import Calibration
    from localrun.plan.replica import Setup
    from localrun.plan.search import Point, Search
    from localrun.plan.workload import Limits, Workload

THIS = "this"
# As `plan.fleet` has them.
ROUTER_NAMES = ("prefix", "session", "least-requests", "two-choices", "round-robin")
MOST_REPLICAS = 10_000
# What may vary, and what is tried where nobody says.
VARIED = {
    "slots": ("4", "8", "16"),
    "kv-cells": ("8192", "16384", "32768"),
    "kv-type": ("f16", "q8_0"),
    "latency": ("interactive", "balanced", "throughput"),
    "speculation": ("on", "off"),
    "machine": (THIS, "rtx-4060-ti-16", "rtx-4090", "m4-max", "l4"),
}
# Of the rate that is carried: where a check is worth most.
CHECKED_LOAD = 0.5


class _Vary(click.ParamType[tuple[str, tuple[str, ...]]]):
    """`slots=4,8,16`, or `slots` for the usual values."""

    name = "NAME=VALUE,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[str, ...]]:
        if isinstance(value, tuple):
            return value
        name, _, values = str(value).partition("=")
        if name not in VARIED:
            way_out = errors.meant(name, VARIED) or f"the names are {', '.join(VARIED)}"
            self.fail(f"'{name}' cannot be varied; {way_out}", param, ctx)
        chosen = tuple(filter(None, (each.strip() for each in values.split(",")))) or VARIED[name]
        for each in chosen:
            problem = _problem(name, each)
            if problem:
                self.fail(problem, param, ctx)
        return name, chosen


def _problem(name: str, value: str) -> str:
    """Why a value cannot be tried; empty if it can."""
    most = {"slots": 256, "kv-cells": 1 << 24}.get(name)
    if most is not None and not (value.isascii() and value.isdigit() and 0 < int(value) <= most):
        return f"{name}={value}: a whole number from 1 to {most} is wanted"
    if name == "kv-type" and value not in KV_TYPES[1:]:
        return f"kv-type={value}: it is one of {', '.join(KV_TYPES[1:])}"
    if name == "speculation" and value not in VARIED[name]:
        return f"speculation={value}: it is on or off"
    if name == "latency":
        try:
            config.latency_target_s(value)
        except config.ConfigError as error:
            return str(error)
    return ""


class _PlanCommand(click.Command):
    """Its word is a model, except for three that are commands of their own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        words = {"calibrate": calibrate_command, "check": check_command, "machines": machines_command}
        if args and args[0] in words:
            return words[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


def _with_workload(function: Callable[..., int]) -> Callable[..., int]:
    option = click.option(
        "--workload", "workload_name", default="chat", show_default=True, metavar="W",
        help="chat, agent, rag, edit, autocomplete or batch, a TOML file, or a trace.",
    )  # fmt: skip
    return option(function)


@click.command("plan", cls=_PlanCommand)
@click.argument("name", metavar="MODEL", shell_complete=complete_here)
@_with_workload
@click.option("--ttft-limit", "ttft_limit_s", type=POSITIVE, metavar="SECONDS",
              help="Longest good time to first token. Default: the workload's, or 2.")  # fmt: skip
@click.option("--itl-limit", "itl_limit_s", type=POSITIVE, metavar="SECONDS",
              help="Longest good time per token. Default: the workload's, or 0.2.")  # fmt: skip
@click.option("--share", type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="So many of the requests have to be good. Default: the workload's, or 0.95.")  # fmt: skip
@click.option("--users", type=POSITIVE, help="Show what so many users get, instead of how many there can be.")
@click.option("--rate", "rate_per_s", type=POSITIVE, help="The same for so many requests per second.")
@click.option("--machine", "machine", default=THIS, metavar="NAME",
              help="Plan for another machine: `localrun plan machines` lists them.")  # fmt: skip
@click.option(
    "--replicas", metavar="N", help="Plan so many of them behind a router, or `auto` for the fewest; needs --rate."
)
@click.option("--router", type=click.Choice(["all", *ROUTER_NAMES]), default="prefix", show_default=True,
              help="How requests are spread over replicas; `localrun cluster` does it by prefix.")  # fmt: skip
@with_price
@click.option("--vary", "varied", type=_Vary(), multiple=True,
              help="Compare: slots=4,8 kv-cells= kv-type= latency= speculation= machine=this,rtx-4090.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Draw the curve as a PNG; a terminal shows it as well.")  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of arrivals and lengths.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def plan_command(
    name: str, workload_name: str, users: float | None, rate_per_s: float | None,
    varied: tuple[tuple[str, tuple[str, ...]], ...], seed: int, as_json: bool, machine: str, replicas: str | None,
    router: str, hourly_price: float | None, watts: float | None, plot_path: Path | None, **limits: float | None,
) -> int:  # fmt: skip
    """How many users this machine carries with MODEL.

    The scheduler and the cache run as they are, in virtual time, with the times that computing takes here. They are
    measured when there is no calibration, in under a minute. The promise is that of `localrun bench chat`.

    \b
    localrun plan calibrate MODEL     measure this machine with MODEL
    localrun plan check MODEL         compare a forecast with a real run
    localrun plan machines [NAME]     the machines that can be varied
    """
    if replicas is not None and (rate_per_s is None or varied):
        raise click.UsageError("--replicas needs a --rate for all of them together, and nothing that varies")
    if users is not None and rate_per_s is not None:
        raise click.UsageError("--users and --rate ask for the same; leave one of them out")
    from localrun.plan.search import Search
    from localrun.plan.traces import named

    if plot_path is not None:
        from localrun.bench.plot import require_matplotlib

        require_matplotlib()
    model, settings = _model(name)
    workload = named(workload_name)
    promise = _promise(workload, limits)
    search = Search(workload, promise, seed=seed)
    asked = _Asked(users, rate_per_s)
    if replicas is not None:
        assert rate_per_s is not None
        setup = _setup(model, settings, machine)
        routers = ROUTER_NAMES if router == "all" else (router,)
        is_estimate = machine != THIS
        return _fleet(
            search, setup, rate_per_s, _count(replicas), routers, hourly_price, is_estimate=is_estimate, as_json=as_json
        )  # fmt: skip
    if machine != THIS:
        varied = (*varied, ("machine", (machine,)))
    if varied:
        return _compare(model, settings, search, dict(varied), asked, as_json=as_json)
    shown = _Shown(hourly_price, watts, plot_path, as_json)
    return _forecast(model, settings, search, asked, shown)


class _Asked(NamedTuple):
    users: float | None
    rate_per_s: float | None

    def point(self, search: Search, setup: Setup) -> Point | None:
        """What was asked about; None if it was how much there can be."""
        if self.users is not None:
            return search.for_users(setup, self.users)
        return search.at(setup, self.rate_per_s) if self.rate_per_s is not None else None


def _model(name: str) -> tuple[Model, Settings]:
    """Raises ModelNotFound, BadRequest or BadModelFile."""
    from localrun.bench.tune import find_model
    from localrun.plan.calibration import settings_for

    settings = config.load({})
    model = find_model(name, settings)
    return model, settings_for(model, settings)


def _promise(workload: Workload, given: dict[str, float | None]) -> Limits:
    import msgspec

    said = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(workload.limits, **said)


def _calibration(model: Model, settings: Settings) -> Calibration:
    """What is kept, or else what is measured now."""
    from localrun.plan.calibration import calibrate, kept, path_of

    return kept(path_of(model, settings)) or calibrate(model, settings, progress)


def _setup(model: Model, settings: Settings, machine: str) -> Setup:
    from localrun.plan.calibration import setup_of
    from localrun.plan.roofline import estimate_of

    if machine != THIS:
        return estimate_of(model.header, machine, settings).setup
    return setup_of(_calibration(model, settings), settings)


def _count(text: str) -> int | None:
    """None for `auto`."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MOST_REPLICAS):
        raise click.UsageError(f"--replicas {text}: a number from 1 to {MOST_REPLICAS}, or auto")
    return int(text)


def _fleet(
    search: Search, setup: Setup, rate_per_s: float, n_replicas: int | None, routers: Sequence[str],
    hourly_price: float | None, *, is_estimate: bool, as_json: bool,
) -> int:  # fmt: skip
    from localrun.plan import report
    from localrun.plan.fleet import FleetSearch
    from localrun.plan.roofline import LEAST_BAND

    fleets = FleetSearch(setup, search.workload, search.limits, rate_per_s, seed=search.seed)
    near = n_replicas or max(1, round(rate_per_s / search.carries(setup).rate_per_s))
    found = []
    for router in routers:
        progress(f"{router}, {near} replicas" if n_replicas else f"{router}, from {near} replicas on")
        found.append(fleets.of(near, router) if n_replicas else fleets.least(router, near))
    if as_json:
        print_json({"workload": search.workload.name, "promise": search.limits, "rate": rate_per_s, "fleets": found})
    else:
        print("\n".join(report.fleet_lines(found, search.limits, hourly_price)))
        if is_estimate:
            say(f"from data sheets (roofline): {LEAST_BAND:.0%} or more to either side")
    return exits.OK


class _Shown(NamedTuple):
    """How a forecast is shown."""

    hourly_price: float | None
    watts: float | None
    plot_path: Path | None
    as_json: bool


def _forecast(model: Model, settings: Settings, search: Search, asked: _Asked, shown: _Shown) -> int:
    from localrun.plan import curve, report
    from localrun.plan.calibration import setup_of
    from localrun.plan.whatif import what_if

    calibration = _calibration(model, settings)
    setup = setup_of(calibration, settings)
    layout = calibration.layout
    lines = report.header_lines(model.name, search.workload, search.limits, layout.slots, layout.n_cells)
    point = asked.point(search, setup)
    found = None
    if point is not None:
        is_kept = point.kept >= search.limits.share
        lines += ["", *report.points_table([point], None, search.limits), ""]
        lines += [f"the promise is {'kept' if is_kept else 'broken'}", "", "where the time goes"]
        lines += report.where_time_goes(point)
        points = [point]
    else:
        progress("looking for the highest rate")
        carried = search.carries(setup)
        points = list(search.points)
        progress("trying what would help")
        found = what_if(search, setup, carried)
        lines += ["", f"carries {report.amount(carried)}", ""]
        lines += [*report.points_table(points, carried, search.limits), "", "where the time goes"]
        lines += [*report.where_time_goes(carried), "", *report.what_if_lines(found, carried)]
        point = carried
        if sys.stdout.isatty() and not shown.as_json:
            lines += ["", *curve.chart(points, carried)]
    if shown.plot_path is not None:
        curve.plot(shown.plot_path, points, point, f"{model.name}, {search.workload.name}")
    if shown.hourly_price is not None:
        lines += ["", *report.cost_lines(point, shown.hourly_price, shown.watts)]
    if shown.as_json:
        print_json({
            "model": model.name, "workload": search.workload.name, "promise": search.limits, "basis": "calibration",
            "calibration": calibration, "point": point, "points": points,
            "what_if": found,
        })  # fmt: skip
    else:
        print("\n".join(lines))
        say("\n" + "\n".join(report.basis_lines(calibration)))
    return exits.OK


class _Row(NamedTuple):
    """A variant: what it carries, or what was asked about; `band` where it is a roofline; or why there is nothing."""

    values: tuple[str, ...]
    point: Point | None
    band: str = ""
    problem: str = ""


def _compare(
    model: Model,
    settings: Settings,
    search: Search,
    varied: dict[str, tuple[str, ...]],
    asked: _Asked,
    *,
    as_json: bool,
) -> int:
    from localrun.plan import report

    rows = []
    for values in itertools.product(*varied.values()):
        progress(", ".join(f"{name} {value}" for name, value in zip(varied, values, strict=True)))
        rows.append(_row(model, settings, search, dict(zip(varied, values, strict=True)), asked))
    if as_json:
        print_json({
            "model": model.name, "workload": search.workload.name, "promise": search.limits, "varied": varied,
            "rows": [row._asdict() for row in rows],
        })  # fmt: skip
        return exits.OK
    print("\n".join(_variants(rows, varied, search.limits, is_asked=asked != _Asked(None, None))))
    say(f"promise: {report.promise(search.limits)}")
    if any(row.band for row in rows):
        say("rooflines are estimates, with their band: calibrate on a machine that you can reach")
    return exits.OK


def _row(model: Model, settings: Settings, search: Search, values: dict[str, str], asked: _Asked) -> _Row:
    try:
        return _variant(model, settings, search, values, asked)
    except errors.LocalrunError as error:
        if isinstance(error, errors.BadRequest) and error.field == "machine":
            raise
        return _Row(tuple(values.values()), None, problem=error.message)


def _variant(model: Model, settings: Settings, search: Search, values: dict[str, str], asked: _Asked) -> _Row:
    """Raises what calibrating, estimating and searching raise."""
    import msgspec

    from localrun.plan import report
    from localrun.plan.calibration import setup_of
    from localrun.plan.roofline import estimate_of
    from localrun.plan.whatif import with_costs

    said: dict[str, Any] = {name: values[name] for name in ("latency", "speculation") if name in values}
    said |= {"kv_type": values["kv-type"]} if "kv-type" in values else {}
    machine = values.get("machine", THIS)
    if machine != THIS:
        said |= {name.replace("-", "_"): int(values[name]) for name in ("slots", "kv-cells") if name in values}
        estimate = estimate_of(model.header, machine, msgspec.structs.replace(settings, **said))
        point = asked.point(search, estimate.setup)
        if point is not None:
            slow = asked.point(search, with_costs(estimate.setup, estimate.slower))
            assert slow is not None
            kept = f"kept {slow.kept:.0%} to {point.kept:.0%} (roofline)"
            return _Row(tuple(values.values()), point, kept)
        points = [search.carries(with_costs(estimate.setup, factor)) for factor in (1.0, estimate.faster)]
        try:
            slow = search.carries(with_costs(estimate.setup, estimate.slower))
        except errors.BadRequest:  # not even one user
            slow = msgspec.structs.replace(points[0], users=0.0, rate_per_s=0.0)
        return _Row(tuple(values.values()), points[0], report.band(slow, *points))
    changed = msgspec.structs.replace(settings, **said)
    calibration = _calibration(model, changed)
    setup = setup_of(calibration, changed)
    layout, most = calibration.layout, 2 * calibration.layout.slots
    if "slots" in values:
        if int(values["slots"]) > most:
            raise errors.BadRequest(f"{layout.slots} slots were calibrated, and a forecast reaches to {most} of them")
        layout = layout.with_slots(int(values["slots"]))
    layout = layout.with_cells(int(values.get("kv-cells", layout.n_cells)))
    setup = setup._replace(layout=layout)
    return _Row(tuple(values.values()), asked.point(search, setup) or search.carries(setup))


def _variants(
    rows: Sequence[_Row], varied: dict[str, tuple[str, ...]], limits: Limits, *, is_asked: bool
) -> Iterator[str]:
    from localrun.bench.report import aligned
    from localrun.plan import report

    cells, problems = [], []
    for row in rows:
        if row.point is None:
            problems.append(f"{' '.join(row.values)}: {row.problem}")
            continue
        carried = row.band or (f"kept {row.point.kept:.0%}" if is_asked else report.amount(row.point))
        digits = report.two_digits if row.band else "{:.3g}".format
        cells.append([
            *row.values, carried, digits(row.point.rate_per_s), digits(row.point.tokens_per_s),
            f"{digits(row.point.ttft_p95_s)} s",
        ])  # fmt: skip
    if cells:
        found = "promise" if is_asked else "carries"
        yield from aligned([*varied, found, "requests/s", "tokens/s", "first token p95"], cells)
    yield from problems
    if is_asked:
        first = next((row for row in rows if row.point is not None and row.point.kept >= limits.share), None)
        yield "none of them keeps it" if first is None else f"the first that keeps it: {' '.join(first.values)}"


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

    model, settings = _model(name)
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
@_with_workload
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

    model, settings = _model(name)
    workload = named(workload_name)
    calibration = _calibration(model, settings)
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
