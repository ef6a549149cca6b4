"""`localrun plan`: how many users a machine carries, what breaks first, and what a change would bring."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.arguments import complete_here
from localrun.cli.bench.command import POSITIVE, SHARE, Worded, with_price
from localrun.cli.bench.plan_words import (
    Picture,
    calibrate_command,
    calibration_of,
    check_command,
    draw,
    kept_if_possible,
    machines_command,
    model_and_settings,
    record_command,
    try_out,
    with_workload,
    workload_of,
)
from localrun.cli.text import print_json, progress, say
from localrun.config import KV_TYPES, Settings

if TYPE_CHECKING:
    from localrun.bench.arrivals import Limits, Workload
    from localrun.models.storage.model import Model
    from localrun.plan.replica import Setup
    from localrun.plan.search import Point, Search

THIS = "this"
# What may vary, and what is tried where nobody says.
VARIED = {
    "slots": ("4", "8", "16"),
    "kv-cells": ("8192", "16384", "32768"),
    "kv-type": ("f16", "q8_0"),
    "latency": ("interactive", "balanced", "throughput"),
    "speculation": ("on", "off"),
    "quantization": ("Q4_K_M", "Q6_K", "Q8_0"),
    "machine": (THIS, "rtx-4060-ti-16", "rtx-4090", "m4-max", "l4"),
    "split": ("layer", "tensor"),
}
# Of a row, beside what it carries.
_FIGURES = ("rate_per_s", "tokens_per_s", "ttft_p95_s")
# Each is searched for seconds.
MOST_VARIANTS = 64

Varied = tuple[tuple[str, tuple[str, ...]], ...]


class Vary(click.ParamType[tuple[str, tuple[str, ...]]]):
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
    if name in ("split", "speculation") and value not in VARIED[name]:
        return f"{name}={value}: it is one of {', '.join(VARIED[name])}"
    try:
        if name == "quantization":
            from localrun.plan.roofline import quantization

            quantization(value)
        elif name == "latency":
            config.latency_target_s(value)
    except (errors.BadRequest, config.ConfigError) as error:
        return str(error)
    return ""


def merged(varied: Varied, price: float | None) -> dict[str, tuple[str, ...]]:
    """All values of each name. Raises UsageError for too many variants, and for a price that is not of all."""
    found: dict[str, tuple[str, ...]] = {}
    for name, values in varied:
        found[name] = (*found.get(name, ()), *(value for value in values if value not in found.get(name, ())))
    n_variants = math.prod(map(len, found.values()))
    if n_variants > MOST_VARIANTS:
        shown = " x ".join(f"{len(values)} {name}" for name, values in found.items())
        raise click.UsageError(f"--vary: {shown} are {n_variants} variants; at most {MOST_VARIANTS} are compared")
    if price is not None and len(found.get("machine", ())) > 1:
        raise click.UsageError(
            "--price-per-hour and --watts are of one machine; vary the others for each machine of its own"
        )
    return found


class Asked(NamedTuple):
    users: float | None
    rate_per_s: float | None

    def point(self, search: Search, setup: Setup) -> Point | None:
        """What was asked about; None if it was how much there can be."""
        if self.users is not None:
            return search.for_users(setup, self.users)
        return search.at(setup, self.rate_per_s) if self.rate_per_s is not None else None


class Shown(NamedTuple):
    hourly_price: float | None
    watts: float | None
    picture: Path | None
    as_json: bool


# As `plan.fleet` has them.
ROUTER_NAMES = ("prefix", "session", "least-requests", "two-choices", "round-robin")
MOST_REPLICAS = 10_000
# The workload whose users are people in a chat.
CHAT = "chat"


class _PlanCommand(Worded):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Of an option that is given twice click would take the last one, and say nothing of the other."""
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for option, n_times in Counter(order).items():
                if n_times > 1 and isinstance(option, click.Option) and not (option.multiple or option.is_flag):
                    name = option.opts[0].removeprefix("--")
                    way_out = f"--vary {name}=A,B compares several" if name in VARIED else "give it once"
                    raise click.UsageError(f"--{name} is given {n_times} times; {way_out}", ctx)
        return super().parse_args(ctx, args)


@click.command("plan", cls=_PlanCommand)
@click.argument("name", metavar="MODEL", shell_complete=complete_here)
@with_workload
@click.option("--ttft-limit", "ttft_limit_s", type=POSITIVE, metavar="SECONDS",
              help="Longest good time to first token. Default: the workload's, or 2.")  # fmt: skip
@click.option("--itl-limit", "itl_limit_s", type=POSITIVE, metavar="SECONDS",
              help="Longest good time per token. Default: the workload's, or 0.2.")  # fmt: skip
@click.option("--share", type=SHARE,
              help="So many of the requests have to be good. Default: the workload's, or 0.95.")  # fmt: skip
@click.option("--users", type=POSITIVE, help="Show what so many users get, instead of how many there can be.")
@click.option("--rate", "rate_per_s", type=POSITIVE, help="The same for so many requests per second.")
@click.option("--machine", "machine", default=THIS, metavar="NAME",
              help="Plan for another machine, or several of it as in rtx-4090x2: `localrun plan machines` lists "
              "them.")  # fmt: skip
@click.option("--split", type=click.Choice(VARIED["split"]),
              help="How several GPUs share a model: by layers, the default, or with parts of each matrix.")  # fmt: skip
@click.option(
    "--replicas", metavar="N", help="Plan so many of them behind a router, or `auto` for the fewest; needs --rate."
)
@click.option("--router", type=click.Choice(["all", *ROUTER_NAMES]),
              help="How requests are spread over replicas. Default: prefix, as in `localrun cluster`.")  # fmt: skip
@with_price
@click.option("--vary", "varied", type=Vary(), multiple=True,
              help="Compare: slots=4,8 kv-cells=... kv-type=... latency=... speculation=on,off "
              "quantization=Q4_K_M,Q8_0 machine=this,rtx-4090x2 split=layer,tensor; all with all.")  # fmt: skip
@click.option("--plot", "picture", type=Picture(), metavar="FILE.png",
              help="Draw the curve of one machine as a PNG; a terminal shows it as well.")  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of arrivals and lengths.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def plan_command(
    name: str, workload_name: str, users: float | None, rate_per_s: float | None, varied: Varied, seed: int,
    as_json: bool, machine: str, split: str | None, replicas: str | None, router: str | None,
    hourly_price: float | None, watts: float | None, picture: Path | None, **limits: float | None,
) -> int:  # fmt: skip
    """How many users this machine carries with MODEL.

    The scheduler and the cache run as they are, in virtual time, with the times that computing takes here. They are
    measured when there is no calibration, in under a minute. The promise is that of `localrun bench chat`.

    \b
    localrun plan calibrate MODEL     measure this machine with MODEL
    localrun plan check MODEL         compare a forecast with a real run
    localrun plan machines [NAME]     the machines that can be varied
    localrun plan record              take down requests, for --workload
    """
    if replicas is not None and (rate_per_s is None or varied):
        raise click.UsageError("--replicas needs a --rate for all of them together, and nothing that varies")
    if replicas is not None and picture is not None:
        raise click.UsageError("--plot draws the curve of one machine; leave it out with --replicas")
    if replicas is None and router is not None:
        raise click.UsageError("--router spreads requests over --replicas, which is missing")
    if users is not None and rate_per_s is not None:
        raise click.UsageError("--users and --rate ask for the same; leave one of them out")
    from localrun.plan.search import Search

    if machine != THIS:
        varied = (*varied, ("machine", (machine,)))
    if split is not None:
        if all(name != "machine" for name, _ in varied):
            raise click.UsageError("--split is of several GPUs; name them with --machine, as rtx-4090x2")
        varied = (*varied, ("split", (split,)))
    shown = Shown(hourly_price, watts, picture, as_json)
    variants = merged(varied, hourly_price)
    model, settings = model_and_settings(name)
    workload = workload_of(workload_name)
    if picture is not None:
        try_out(picture)
    promise = _promise(workload, limits)
    search = Search(workload, promise, seed=seed)
    asked = Asked(users, rate_per_s)
    if replicas is not None:
        assert rate_per_s is not None
        setup = _setup(model, settings, machine, split or VARIED["split"][0])
        routers = ROUTER_NAMES if router == "all" else (router or ROUTER_NAMES[0],)
        return _fleet(search, setup, rate_per_s, _count(replicas), routers, shown, is_estimate=machine != THIS)
    if variants:
        return compare(model, settings, search, variants, asked, shown)
    return _forecast(model, settings, search, asked, shown)


def _promise(workload: Workload, given: dict[str, float | None]) -> Limits:
    import msgspec

    said = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(workload.limits, **said)


def _setup(model: Model, settings: Settings, machine: str, split: str) -> Setup:
    from localrun.plan.calibration import setup_of
    from localrun.plan.roofline import estimate_of

    if machine != THIS:
        return estimate_of(model.header, machine, settings, split).setup
    return setup_of(calibration_of(model, settings), settings)


def _count(text: str) -> int | None:
    """None for `auto`."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MOST_REPLICAS):
        raise click.UsageError(f"--replicas {text}: a number from 1 to {MOST_REPLICAS}, or auto")
    return int(text)


def _fleet(
    search: Search, setup: Setup, rate_per_s: float, n_replicas: int | None, routers: Sequence[str], shown: Shown, *,
    is_estimate: bool,
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
    prices = [
        report.fleet_price(each, shown.hourly_price, is_estimate=is_estimate, is_least=n_replicas is None)
        for each in found
    ]
    if shown.as_json:
        print_json({
            "workload": search.workload.name, "promise": search.limits, "rate": rate_per_s, "fleets": found,
            "prices": prices,
        })  # fmt: skip
    else:
        print("\n".join(report.fleet_lines(found, search.limits, prices, shown.watts)))
        if is_estimate:
            say(f"from data sheets (roofline): {LEAST_BAND:.0%} or more to either side")
    return exits.OK


def _forecast(model: Model, settings: Settings, search: Search, asked: Asked, shown: Shown) -> int:
    from localrun.plan import report
    from localrun.plan.calibration import setup_of
    from localrun.plan.search import what_if

    calibration = calibration_of(model, settings)
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
        _keep(model, search, carried)
        progress("trying what would help")
        found = what_if(search, setup, carried)
        lines += ["", f"carries {report.amount(carried)}", ""]
        lines += [*report.points_table(points, carried, search.limits), "", "where the time goes"]
        lines += [*report.where_time_goes(carried), "", *report.what_if_lines(found, carried)]
        point = carried
        if sys.stdout.isatty() and not shown.as_json:
            lines += ["", *report.chart(points, carried)]
    if shown.hourly_price is not None:
        lines += ["", *report.cost_lines(point, shown.hourly_price, shown.watts)]
    if shown.as_json:
        print_json({
            "model": model.name, "workload": search.workload.name, "promise": search.limits, "basis": "calibration",
            "calibration": calibration, "point": point, "points": points,
            "what_if": found, "price": report.price_of(point, shown.hourly_price),
        })  # fmt: skip
    else:
        print("\n".join(lines))
        say("\n" + "\n".join(report.basis_lines(calibration)))
    return draw(shown.picture, points, point, f"{model.name}, {search.workload.name}")


def _keep(model: Model, search: Search, carried: Point) -> None:
    """For lists of models: how many chats there can be, under the usual promise."""
    from datetime import UTC, datetime

    from localrun.models.storage.model import Forecast, keep_forecast

    usual, n_chats = search.workload, int(carried.users or 0)
    if usual.name == CHAT and search.limits == usual.limits and n_chats:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with kept_if_possible("this forecast"):
            keep_forecast(
                model.digest, Forecast(chats=n_chats, tokens_per_s=carried.each_p50_tokens_per_s, made_at=now)
            )


# --- `--vary`: a row for each variant of settings, quantization and machine, and what it carries ---


class _Row(NamedTuple):
    """A variant: what it carries, or what was asked about; `band` where it is an estimate, with the least and the most
    of other figures, and how many of the requests that were asked about keep the promise at its lower end; or why there
    is nothing."""

    values: tuple[str, ...]
    point: Point | None
    band: str = ""
    least_kept: float = 0.0
    ends: dict[str, tuple[float, float]] | None = None
    problem: str = ""

    def price(self, hourly_price: float | None) -> dict[str, Any] | None:
        from localrun.plan.report import price_of

        return price_of(self.point, hourly_price, tokens_per_s=self.ends["tokens_per_s"] if self.ends else None)


def compare(
    model: Model, settings: Settings, search: Search, varied: dict[str, tuple[str, ...]], asked: Asked, shown: Shown
) -> int:
    """Raises UsageError for a picture of several, and BadRequest for a machine that is not known."""
    from localrun.plan import report
    from localrun.plan.roofline import device

    variants = list(itertools.product(*varied.values()))
    if shown.picture is not None and len(variants) > 1:
        raise click.UsageError(f"--plot draws one curve, and these are {len(variants)} variants; leave it out")
    for name in varied.get("machine", ()):
        if name != THIS:
            device(name)  # one that is not known is said before anything is simulated
    rows = []
    for values in variants:
        progress(", ".join(f"{name} {value}" for name, value in zip(varied, values, strict=True)))
        rows.append(_row(model, settings, search, dict(zip(varied, values, strict=True)), asked))
    is_asked = asked != Asked(None, None)
    if shown.as_json:
        print_json({
            "model": model.name, "workload": search.workload.name, "promise": search.limits, "varied": varied,
            "rows": [row._asdict() | {"price": row.price(shown.hourly_price)} for row in rows],
        })  # fmt: skip
    else:
        print("\n".join(_lines(rows, varied, search.limits, shown.hourly_price, is_asked=is_asked)))
        say(f"promise: {report.promise(search.limits)}")
        if any("roofline" in row.band for row in rows):
            say("rooflines are estimates, with their band: calibrate on a machine that you can reach")
        if any("estimate" in row.band for row in rows):
            say("other quantizations are estimated from what was measured here: calibrate with the file itself")
    if all(row.point is None for row in rows):
        return exits.ERROR
    point = rows[-1].point
    if shown.picture is None or point is None:
        return exits.OK
    points = search.points if point in search.points else [point]
    return draw(shown.picture, points, point, f"{model.name}, {search.workload.name}, {' '.join(rows[-1].values)}")


def _row(model: Model, settings: Settings, search: Search, values: dict[str, str], asked: Asked) -> _Row:
    try:
        return _variant(model, settings, search, values, asked)
    except errors.LocalrunError as error:
        return _Row(tuple(values.values()), None, problem=error.message)


def _variant(model: Model, settings: Settings, search: Search, values: dict[str, str], asked: Asked) -> _Row:
    """The middle is searched last, so that `search.points` are its own."""
    import msgspec

    from localrun.plan import report
    from localrun.plan.roofline import estimate
    from localrun.plan.search import with_costs

    setup, slower, faster = estimate(model, settings, values, calibration_of)
    basis = "estimate" if values.get("machine", THIS) == THIS else "roofline"
    own = tuple(values.values())
    if slower == faster == 1:
        found = asked.point(search, setup) or search.carries(setup)
        return _Row(own, found, least_kept=found.kept)
    if asked != Asked(None, None):
        costs = (with_costs(setup, slower), setup, with_costs(setup, faster))
        points = [point for each in costs if (point := asked.point(search, each)) is not None]
        slow, middle, _ = points
        ends = {name: _least_and_most(name, points) for name in _FIGURES}
        return _Row(own, middle, f"kept {slow.kept:.0%} to {middle.kept:.0%} ({basis})", slow.kept, ends)
    fast = search.carries(with_costs(setup, faster))
    try:
        slow = search.carries(with_costs(setup, slower))
    except errors.BadRequest:  # not even one user
        slow = msgspec.structs.replace(fast, users=0.0, rate_per_s=0.0, tokens_per_s=0.0)
    middle = search.carries(setup)
    ends = {name: report.ends(name, slow, middle, fast) for name in _FIGURES[:2]}
    ends["ttft_p95_s"] = _least_and_most("ttft_p95_s", [slow, middle, fast])
    return _Row(own, middle, report.band(slow, middle, fast, basis), ends=ends)


def _least_and_most(name: str, points: Sequence[Point]) -> tuple[float, float]:
    values = [getattr(point, name) for point in points]
    return min(values), max(values)


def _lines(
    rows: Sequence[_Row], varied: dict[str, tuple[str, ...]], limits: Limits, hourly_price: float | None, *,
    is_asked: bool,
) -> Iterator[str]:  # fmt: skip
    from localrun.bench.report import aligned
    from localrun.plan import report

    cells, problems = [], []
    for row in rows:
        if row.point is None:
            problems.append(f"{' '.join(row.values)}: {row.problem}")
            continue
        carried = row.band or (f"kept {row.point.kept:.0%}" if is_asked else report.amount(row.point))
        price = row.price(hourly_price)
        rate, tokens, wait_s = (
            report.span(*row.ends[name]) if row.ends else f"{getattr(row.point, name):.3g}" for name in _FIGURES
        )
        priced = [report.price_cell(price, "per_million_tokens")] if price else []
        cells.append([*row.values, carried, rate, tokens, f"{wait_s} s", *priced])
    if cells:
        found = "promise" if is_asked else "carries"
        priced = [] if hourly_price is None else ["per million"]
        yield from aligned([*varied, found, "requests/s", "tokens/s", "first token p95", *priced], cells)
    yield from problems
    if is_asked and cells:
        first = next((row for row in rows if row.least_kept >= limits.share), None)
        yield "none of them surely keeps it" if first is None else f"the first that keeps it: {' '.join(first.values)}"


plan_command.words = {
    "calibrate": calibrate_command, "check": check_command, "machines": machines_command, "record": record_command,
}  # fmt: skip
