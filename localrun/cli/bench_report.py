"""What `bench` and `bench peer` have in common: the options about what is done with the numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from localrun.bench.decode_curve import CurvePoint
    from localrun.bench.results import RunResult

_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """`hourly_price` is in the currency of whoever asked; `bandwidth_bytes_per_s` is None when it is to be measured."""

    hourly_price: float | None
    bandwidth_bytes_per_s: float | None
    json_path: Path | None
    plot_path: Path | None

    def write(self, outcome: object, curves: Mapping[str, Sequence[CurvePoint]], results: list[RunResult]) -> None:
        """The files that were asked for."""
        if self.json_path is not None:
            import msgspec

            self.json_path.write_bytes(msgspec.json.encode(outcome, enc_hook=str))
        if self.plot_path is not None:
            from localrun.bench.latency import latency_ranges
            from localrun.bench.plot import plot

            plot(self.plot_path, curves, latency_ranges(results))

    def curve_lines(self, curves: Mapping[str, Sequence[CurvePoint]]) -> list[str]:
        """The decode curves as tables and as a chart."""
        from localrun.bench.chart import decode_chart
        from localrun.bench.report import curve_tables

        return [*curve_tables(curves, self.hourly_price), *decode_chart(curves).splitlines()]


def with_reporting(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command these options, and its function the argument `reporting`. What cannot work is said at once."""

    @click.option("--price-per-hour", type=float, help="Price of this machine, for the cost of a million tokens.")
    @click.option("--watts", type=float, help="Power that this machine draws; goes with --price-per-kwh.")
    @click.option("--price-per-kwh", type=float, help="Price of a kilowatt-hour.")
    @click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), metavar="GB/S",
                  help="Of the memory that holds the model. Default: that of main memory, measured.")  # fmt: skip
    @click.option("--json", "json_path", type=_FILE, help="Write everything to this file, every request included.")
    @click.option("--plot", "plot_path", type=_FILE, help="Draw the decode curve and the latencies into this PNG.")
    @functools.wraps(function)
    def with_options(
        *arguments: Any, price_per_hour: float | None, watts: float | None, price_per_kwh: float | None,
        bandwidth: float | None, json_path: Path | None, plot_path: Path | None, **options: Any,
    ) -> int:  # fmt: skip
        from localrun.bench import cost

        if plot_path is not None:
            from localrun.bench.plot import require_matplotlib

            require_matplotlib()
        reporting = Reporting(
            hourly_price=cost.price_per_hour(price_per_hour=price_per_hour, watts=watts, price_per_kwh=price_per_kwh),
            bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e9,
            json_path=json_path,
            plot_path=plot_path,
        )
        return function(*arguments, reporting=reporting, **options)

    return with_options
