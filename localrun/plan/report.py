"""Forecasts as text for a terminal, and their curve, in text or as a PNG (which needs matplotlib, the extra `bench`).

A forecast of a roofline never comes without its band, with two significant digits, and says what it is; one of a
calibration says how far the last check was off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localrun.bench.arrivals import Limits, Workload
from localrun.bench.report import aligned, cost_per_million_tokens, require_matplotlib, text_chart
from localrun.plan.calibration import Calibration
from localrun.plan.check import COMPARED, Comparison
from localrun.plan.costs import Account
from localrun.plan.fleet import FleetPoint
from localrun.plan.roofline import LEAST_BAND, Device
from localrun.plan.search import BEYOND, Point, Tried, WhatIf

_POINTS = ["", "users", "requests/s", "first token p50/p95", "tokens/s each p50/p5", "tokens/s", "busy", "promise kept"]
_MOST_POINTS = 6
# A wait for cells of so much of the time is worth a word.
_BLOCKED = 0.02


def promise(limits: Limits) -> str:
    return (
        f"first token within {limits.ttft_limit_s:g} s and {1 / limits.itl_limit_s:.3g} tokens/s or more, for "
        f"{100 * limits.share:g} of 100 requests"
    )


def amount(point: Point) -> str:
    """What is carried: whole users, where there are any, or requests."""
    if point.users is None or point.users < 1:
        return f"{point.rate_per_s:.2g} requests/s"
    n_users = math.floor(point.users)
    return f"{n_users} user{'s' if n_users > 1 else ''}"


def points_table(points: Sequence[Point], carried: Point | None, limits: Limits) -> list[str]:
    """Rates, slowest first, the one that is carried marked. Of runs that were given up nothing is known but that."""
    rows = []
    for point in _chosen(points, carried):
        users = _users(point, is_carried=point is carried)
        cells = [">" if point is carried else "", users, f"{point.rate_per_s:.3g}"]
        if point.is_given_up:
            cells += ["-", "-", "-", "-", f"below {limits.share:.0%}"]
        else:
            cells += [
                f"{point.ttft_p50_s:.2g} s / {point.ttft_p95_s:.2g} s",
                f"{point.each_p50_tokens_per_s:.3g} / {point.each_p5_tokens_per_s:.3g}",
                f"{point.tokens_per_s:.3g}",
                f"{point.busy:.0%}",
                f"{point.kept:.0%}",
            ]
        rows.append(cells)
    return aligned(_POINTS, rows)


def _users(point: Point, *, is_carried: bool) -> str:
    """Whole ones of what is carried, as `amount` says it."""
    if point.users is None or point.is_given_up:
        return "-"
    if point.users >= 100 or (is_carried and point.users >= 1):
        return str(math.floor(point.users))
    return f"{point.users:.3g}"


def _chosen(points: Sequence[Point], carried: Point | None) -> list[Point]:
    """Not the many near the limit: the one that is carried, and those furthest from it and each other."""
    ordered = sorted(points, key=lambda point: point.rate_per_s)
    while len(ordered) > _MOST_POINTS:
        inner = [at for at in range(1, len(ordered) - 1) if ordered[at] is not carried]
        del ordered[min(inner, key=lambda at: ordered[at + 1].rate_per_s / ordered[at - 1].rate_per_s)]
    return ordered


def where_time_goes(point: Point) -> list[str]:
    """Of the time in which anything is computed, most first."""
    spent = sorted(point.spent.items(), key=lambda item: -item[1])
    lines = [f"  {share:4.0%}  {what}" for what, share in spent if share >= 0.005]
    if point.blocked_share > _BLOCKED:
        lines.append(f"  requests waited for KV cells while slots were free in {point.blocked_share:.0%} of the time")
    if point.n_preempted:
        lines.append(
            f"  requests lost their slots {point.n_preempted} times, for others of a higher lane or for KV cells"
        )
    if point.n_failed:
        n_failed = "one request" if point.n_failed == 1 else f"{point.n_failed} requests"
        lines.append(f"  {n_failed} could not be answered: {point.problem}")
    return lines


def what_if_lines(found: WhatIf, carried: Point) -> list[str]:
    """What is short, and what one change would bring."""
    lines = [f"what breaks first: {found.bottleneck}", f"  {_change(found.twice, carried)}"]
    if found.best is not None:
        lines += ["the best change of a setting", f"  {_change(found.best, carried)}"]
    else:
        settings = ", ".join(each.words for each in found.settings)
        lines.append(f"no change of a setting carries more; tried: {settings}")
    tried = sorted((*found.resources, *found.settings), key=lambda each: -each.kept_beyond)
    rows = [[each.words, f"{each.kept_beyond:.0%}"] for each in tried]
    lines += [f"at {BEYOND:g} times that rate the promise is kept for {found.kept_beyond:.0%}, and", ""]
    return [*lines, *(f"  {line}" for line in aligned(["with", "kept"], rows))]


def _change(tried: Tried, carried: Point) -> str:
    assert tried.carries is not None
    return f"{tried.words}: {amount(carried)} -> {amount(tried.carries)} (simulated)"


def basis_lines(calibration: Calibration) -> list[str]:
    """How far a forecast can be trusted."""
    fit = f"the fit is {calibration.median_error:.0%} off in the median, {calibration.worst_error:.0%} at most"
    lines = [f"calibrated {calibration.made_at[:16].replace('T', ' ')} UTC on {calibration.machine}; {fit}"]
    if calibration.is_disturbed:
        lines.append(f"other programs took {calibration.others:.1f} processors meanwhile: calibrate again without them")
    if not calibration.checks:
        return [*lines, "never checked against a real run: `localrun plan check` does it"]
    check = calibration.checks[-1]
    errors = ", ".join(f"{_label(name)} {_off(error)}" for name, error in check.errors.items())
    return [*lines, f"last check, {check.workload} at {check.rate_per_s:.3g} requests/s: {errors}"]


def _off(error: float) -> str:
    """An error as people say it: nobody reads percents of more than ten times."""
    return f"{error:+.0%}" if error < 10 else f"{error + 1:.2g} times as much"


def _label(metric: str) -> str:
    """As people call it."""
    return "throughput" if metric == "tokens_per_s" else metric.removesuffix("_s").replace("_", " ")


def cost_lines(point: Point, hourly: float, watts: float | None) -> list[str]:
    """What an hour and a million tokens cost: price_per_hour * 1e6 / (3600 * tokens_per_s), at this rate. Prompts bear
    the share of the time that they take, where that is known."""
    lines = [f"costs {hourly:.4g} an hour; {cost_per_million_tokens(hourly, point.tokens_per_s):.3g} per million tokens"
             " of answers, prompts included"]  # fmt: skip
    if point.spent and point.prompt_tokens_per_s:
        share = point.spent.get(Account.PROMPTS, 0.0) + point.spent.get(Account.COPIES, 0.0)
        read = cost_per_million_tokens(hourly * share, point.prompt_tokens_per_s)
        written = cost_per_million_tokens(hourly * (1 - share), point.tokens_per_s)
        lines.append(f"  apart: {read:.3g} per million tokens of prompts, {written:.3g} per million of answers")
    if watts is not None and point.tokens_per_s:
        lines.append(f"  {_kwh_per_million(point, watts):.3g} kWh per million tokens of answers")
    return lines


def price_of(
    point: Point | None, hourly_price: float | None, n_replicas: int = 1, *,
    replicas: tuple[int, int] | None = None, tokens_per_s: tuple[float, float] | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Per hour, and per million tokens of answers; None where no price is known. Of an estimate with the least and the
    most, from those of what is paid or of what comes out."""
    if point is None or hourly_price is None:
        return None
    hourly = hourly_price * n_replicas
    price: dict[str, Any] = {
        "per_hour": hourly,
        "per_million_tokens": cost_per_million_tokens(hourly, point.tokens_per_s),
    }
    if replicas is not None:
        price["per_hour_band"] = [hourly_price * n for n in replicas]
    if replicas is not None or tokens_per_s is not None:
        hours = price.get("per_hour_band", (hourly, hourly))
        slow, fast = tokens_per_s or (point.tokens_per_s, point.tokens_per_s)
        # Where nothing comes out, no price is the most.
        most = cost_per_million_tokens(hours[1], slow) if slow > 0 else None
        price["per_million_tokens_band"] = [cost_per_million_tokens(hours[0], fast), most]
    return price


def price_cell(price: dict[str, Any], name: str) -> str:
    """As `0.278`, or `0.21 to 0.43` of an estimate."""
    if f"{name}_band" not in price:
        return f"{price[name]:.4g}" if name == "per_hour" else f"{price[name]:.3g}"
    least, most = price[f"{name}_band"]
    return f"{two_digits(least)} or more" if most is None else span(least, most)


def fleet_price(each: FleetPoint, hourly_price: float | None, *, is_estimate: bool, is_least: bool) -> Any:
    """Machines that are estimated may be fewer or more, where their number was looked for; else less may come out."""
    n, tokens_per_s = each.n_replicas, each.point.tokens_per_s
    if not is_estimate:
        return price_of(each.point, hourly_price, n)
    if is_least:
        replicas = math.ceil(n / (1 + LEAST_BAND)), math.ceil(n / (1 - LEAST_BAND))
        return price_of(each.point, hourly_price, n, replicas=replicas)
    return price_of(each.point, hourly_price, n, tokens_per_s=((1 - LEAST_BAND) * tokens_per_s, tokens_per_s))


def _kwh_per_million(point: Point, watts: float, n_replicas: int = 1) -> float:
    """Of tokens of answers."""
    return watts * n_replicas / 1000 / 3600 / max(point.tokens_per_s, 1e-9) * 1e6


def fleet_lines(
    found: Sequence[FleetPoint], limits: Limits, prices: Sequence[dict[str, Any] | None], watts: float | None = None
) -> list[str]:
    header = ["router", "replicas", "promise kept", "tokens/s", "first token p95", "cached", "fullest", "busy"]
    rows = []
    for each, price in zip(found, prices, strict=True):
        point = each.point
        row = [
            each.router, str(each.n_replicas), f"{point.kept:.0%}", f"{point.tokens_per_s:.3g}",
            f"{point.ttft_p95_s:.2g} s", f"{point.cached_share:.0%}", f"{each.fullest:.2f}", f"{point.busy:.0%}",
        ]  # fmt: skip
        if price is not None:
            row += [price_cell(price, "per_hour"), price_cell(price, "per_million_tokens")]
        if watts is not None:
            row.append(f"{_kwh_per_million(point, watts, each.n_replicas):.3g}")
        rows.append(row)
    header += ["per hour", "per million"] if any(prices) else []
    header += [] if watts is None else ["kWh per million"]
    lines = aligned(header, rows)
    rough = [each for each in found if each.coarse_error is not None]
    if rough:
        error = max(abs(each.coarse_error or 0.0) for each in rough)
        lines.append(
            f"some replicas were simulated exactly; the router saw coarse ones, whose first tokens are {error:.0%} off"
        )
    return [*lines, f"promise: {promise(limits)}"]


def header_lines(model: str, workload: Workload, limits: Limits, slots: int, n_cells: int) -> list[str]:
    lines = [f"{model}: {slots} slots, {n_cells} KV cells", f"workload: {workload.name} ({workload.summary})"]
    if workload.think_s is not None:
        lines.append(f"a user asks again {workload.think_s:.3g} s after an answer; requests come by themselves")
    return [*lines, f"promise: {promise(limits)}"]


def band(low: Point, middle: Point, high: Point, basis: str = "roofline") -> str:
    """What is carried by an estimate."""
    in_users = middle.users is not None and middle.users >= 1
    unit = "users" if in_users else "requests/s"
    return f"{span(*ends('users' if in_users else 'rate_per_s', low, middle, high))} {unit} ({basis})"


def ends(field: str, *points: Point) -> tuple[float, float]:
    """The least and the most of what is carried, of a machine that is slower, as estimated, and faster: never closer
    than `LEAST_BAND`."""
    values = [getattr(point, field) or 0.0 for point in points]
    return min(values[0], (1 - LEAST_BAND) * values[1]), max(values[2], (1 + LEAST_BAND) * values[1])


def span(least: float, most: float) -> str:
    """Two digits of each; one number where they are the same."""
    first, last = two_digits(least), two_digits(most)
    return first if first == last else f"{first} to {last}"


def two_digits(value: float) -> str:
    """As `1.2`, `35` or `350`."""
    if value <= 0:
        return "0"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):.{max(0, digits)}f}"


def comparison_lines(found: Comparison, workload: Workload) -> list[str]:
    errors = {
        name: f"{_off(error)} (accidents alone: {found.accidents.get(name, 0.0):.0%})"
        for name, error in found.check.errors.items()
    }
    rows = [
        [
            _label(name),
            f"{found.real[name]:.4g} {unit}",
            f"{found.simulated[name]:.4g} {unit}",
            errors.get(name, "-"),
        ]
        for name, unit in COMPARED.items()
        if name in found.real and name in found.simulated
    ]
    title = f"{workload.name}, {found.check.rate_per_s:.3g} requests/s"
    return [
        *aligned([title, "real", "simulated", "error"], rows),
        f"other programs took {found.check.others:.2f} processors during the real run; the machine took "
        f"{found.check.slowdown:.2f} times as long for prompts as when it was calibrated",
    ]


def machine_lines(name: str, device: Device) -> list[str]:
    """Each figure with its source."""
    rows = [
        ["memory", f"{device.memory_gb:g} GB", device.source],
        ["bandwidth", f"{device.gb_per_s:g} GB/s", device.source],
        ["arithmetic", f"{device.tflops:g} TFLOPS {device.arithmetic}", device.tflops_source or device.source],
        ["power", f"{device.watts:g} W", device.source],
    ]
    if device.link_gb_per_s:
        rows.append(["link", f"{device.link_gb_per_s:g} GB/s", "one way, where there are several"])
    several = f"{device.n_gpus} times, each " if device.n_gpus > 1 else ""
    lines = [f"{name}: {several}{device.title}"]
    lines += [f"  {what:<10}  {figure:<18}  {source}" for what, figure, source in rows]
    return [*lines, *([f"  {device.note}"] if device.note else [])]


_LINES = (("first token p50", "ttft_p50_s"), ("first token p95", "ttft_p95_s"), ("between tokens p50", "itl_p50_s"),
          ("between tokens p95", "itl_p95_s"))  # fmt: skip


def _drawn(points: Sequence[Point]) -> list[Point]:
    """Runs that were given up have no times."""
    return sorted((point for point in points if not point.is_given_up), key=lambda point: point.rate_per_s)


def chart(points: Sequence[Point], knee: Point) -> list[str]:
    """Lines of text; none with fewer than two points."""
    drawn = _drawn(points)

    def draw(plotext: Any) -> None:
        rates = [point.rate_per_s for point in drawn]
        for (label, field), mark in zip(_LINES, "oOxX", strict=True):
            plotext.plot(rates, [max(1e-4, getattr(point, field)) for point in drawn], marker=mark, label=label)
        plotext.vline(knee.rate_per_s)

    title = "seconds by requests per second; | is the highest rate that keeps the promise"
    return text_chart(title, "requests per second", 18, draw) if len(drawn) > 1 else []


def plot(path: Path, points: Sequence[Point], knee: Point, title: str) -> None:
    """Write a PNG. Raises NotSupported without matplotlib, and OSError."""
    require_matplotlib()
    from matplotlib.figure import Figure

    drawn = _drawn(points)
    figure = Figure(figsize=(8, 6), layout="constrained")
    times, kept = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rates = [point.rate_per_s for point in drawn]
    for label, field in _LINES:
        times.plot(rates, [getattr(point, field) for point in drawn], marker="o", label=label)
    everything = sorted(points, key=lambda point: point.rate_per_s)
    kept.plot([each.rate_per_s for each in everything], [100 * each.kept for each in everything], marker="o")
    for axes in (times, kept):
        axes.axvline(knee.rate_per_s, linestyle="--", color="grey")
    times.set(yscale="log", ylabel="seconds", title=title)
    times.legend()
    kept.set(xlabel="requests per second", ylabel="promise kept, %", ylim=(0, 105))
    figure.savefig(path, format="png", dpi=120)
