"""`localrun plan --vary`: a row for each variant of settings, quantization and machine, and what it carries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from localrun import config, errors
from localrun.cli import exits
from localrun.cli.bench.plan_words import calibration_of, draw
from localrun.cli.text import print_json, progress, say
from localrun.config import KV_TYPES, Settings

if TYPE_CHECKING:
    from localrun.bench.arrivals import Limits
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
    if name == "quantization":
        from localrun.plan.roofline import problem_of

        return problem_of(value)
    if name == "latency":
        try:
            config.latency_target_s(value)
        except config.ConfigError as error:
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

    variants = list(itertools.product(*varied.values()))
    if shown.picture is not None and len(variants) > 1:
        raise click.UsageError(f"--plot draws one curve, and these are {len(variants)} variants; leave it out")
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
        if isinstance(error, errors.BadRequest) and error.field == "machine":
            raise
        return _Row(tuple(values.values()), None, problem=error.message)


def _variant(model: Model, settings: Settings, search: Search, values: dict[str, str], asked: Asked) -> _Row:
    """The middle is searched last, so that `search.points` are its own."""
    import msgspec

    from localrun.plan import report
    from localrun.plan.roofline import THIS, estimate
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
