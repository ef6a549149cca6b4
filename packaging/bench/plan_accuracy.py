"""How far off `localrun plan` is on this machine: `PYTHONPATH=packaging python -m bench.plan_accuracy MODEL`.

Workloads that nothing was calibrated with (`plan_accuracy.toml`) run against a daemon of our own and in simulations, at
parts of the highest rate that a simulation without drafts carries, with drafts and without. What the machine takes is
measured again between all of them. Each comparison is a line of a file as soon as it is there: started anew, the
program goes on after the last one. At the end, and with --table at once, it prints what the file has. A percentile of
some dozens of requests is an accident, and the table says how large that is: more --minutes make it smaller.

The promise is that of the workload, or what a request that is alone takes, `PATIENCE` times, if that is more.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from localrun.bench.arrivals import Limits, Workload, WorkloadFile, as_sent
from localrun.bench.results import Metrics
from localrun.cli import exits
from localrun.cli.arguments import NumberList
from localrun.cli.bench.plan_words import calibration_of, model_and_settings
from localrun.cli.text import progress
from localrun.config import Settings
from localrun.errors import BadRequest, LocalrunError
from localrun.models.storage.model import Model
from localrun.plan.calibration import Calibration, Speed, daemon, setup_of
from localrun.plan.check import N_WARM, compared, run, scaled
from localrun.plan.replica import Setup
from localrun.plan.search import Search

WORKLOADS = Path(__file__).with_name("plan_accuracy.toml")
LOADS = (30, 50, 65, 90, 110)
# With drafts nobody looks for a knee.
MOST_DRAFTED_LOAD = 100
LEAST_REQUESTS = 2 * N_WARM
# Of each comparison, for a daemon that starts and what the machine takes.
OVERHEAD_S = 20.0
PATIENCE, ALONE_PER_S = 3.0, 1e-4
# Of all figures. Above so many percent of the knee an error of the service time is many times as large in a wait.
ALLOWED, UNSTABLE_LOAD = 0.15, 80
SHOWN = {
    "tokens_per_s": "tok/s",
    "ttft_p50_s": "TTFT p50",
    "ttft_p95_s": "TTFT p95",
    "itl_p50_s": "ITL p50",
    "itl_p95_s": "ITL p95",
    "cached_tokens": "cached",
    "drafted_tokens": "drafted",
}
MILLISECONDS = "ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison, of the calibration that was made then. `load` is in percent of the simulated knee."""

    calibrated_at: str
    workload: str
    drafts: bool
    load: int
    knee_per_s: float
    limits: Limits
    n_requests: int
    real: Metrics
    simulated: Metrics
    accidents: Metrics
    others: float
    slowdown: float

    @property
    def name(self) -> tuple[str, bool, int]:
        return self.workload, self.drafts, self.load


def read(path: Path, calibrated_at: str | None = None) -> list[Cell]:
    """What was compared, with this calibration or the latest one."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    cells = [msgspec.json.decode(line, type=Cell) for line in lines]
    calibrated_at = calibrated_at or (cells[-1].calibrated_at if cells else "")
    return [cell for cell in cells if cell.calibrated_at == calibrated_at]


class Comparisons:
    """Fills the file."""

    def __init__(self, model: Model, settings: Settings, calibration: Calibration, path: Path, seconds: float) -> None:
        self._model, self._settings, self._calibration = model, settings, calibration
        self._path, self._seconds = path, seconds
        self._speed: Speed | None = None
        self._knees = {cell.workload: (cell.knee_per_s, cell.limits) for cell in read(path, calibration.made_at)}

    def add(self, workload: Workload, load: int, *, drafts: bool) -> None:
        """One more. Raises LocalrunError."""
        setup = setup_of(self._calibration, self._settings)._replace(speculates=drafts)
        before = self._speed = self._speed or self._now()
        if workload.name not in self._knees:
            progress(f"{workload.name}: looking for the knee")
            plain = scaled(setup._replace(speculates=False), [before])
            limits = possible(workload, plain)
            self._knees[workload.name] = Search(workload, limits).carries(plain).rate_per_s, limits
        knee_per_s, limits = self._knees[workload.name]
        workload = workload._replace(limits=limits)
        rate_per_s = load / 100 * knee_per_s
        seed = 100 * load + drafts
        sessions = as_sent(workload.sessions(max(LEAST_REQUESTS, round(rate_per_s * self._seconds)), seed))
        n_requests = sum(len(session.turns) for session in sessions)
        progress(
            f"{workload.name}, drafts {'on' if drafts else 'off'}, {load} %: {n_requests} requests, {rate_per_s:.3g}/s"
        )
        with daemon(self._model, self._settings, self._calibration.layout) as server:
            real = run(server, sessions, rate_per_s, seed, speculates=drafts)
        self._speed = self._now()
        found = compared(real, setup, workload, sessions, rate_per_s, seed, [before, self._speed])
        cell = Cell(
            calibrated_at=self._calibration.made_at,
            workload=workload.name,
            drafts=drafts,
            load=load,
            knee_per_s=knee_per_s,
            limits=workload.limits,
            n_requests=n_requests,
            real=found.real,
            simulated=found.simulated,
            accidents=found.accidents,
            others=real.others,
            slowdown=found.check.slowdown,
        )
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(cell) + b"\n")

    def _now(self) -> Speed:
        return Speed.now(self._model, self._settings, self._calibration)


def possible(workload: Workload, setup: Setup) -> Limits:
    """A promise that this machine can keep."""
    alone = Search(workload, workload.limits).at(setup, ALONE_PER_S)
    return msgspec.structs.replace(
        workload.limits,
        ttft_limit_s=max(workload.limits.ttft_limit_s, PATIENCE * alone.ttft_p95_s),
        itl_limit_s=max(workload.limits.itl_limit_s, PATIENCE * alone.itl_p95_s),
    )


def error_of(real: float, simulated: float) -> float | None:
    """None where there was nothing."""
    return simulated / real - 1 if real else None


def knee(cells: Sequence[Cell], *, simulated: bool) -> float | None:
    """The rate up to which the promise is kept, on a line between the last load where it is and the first where it is
    not; None if it never breaks, or always."""
    by_load = sorted(cells, key=lambda cell: cell.load)
    points = [(each.load, (each.simulated if simulated else each.real)["kept"]) for each in by_load]
    for (low, well), (high, badly) in itertools.pairwise(points):
        share = by_load[0].limits.share
        if well >= share > badly:
            return by_load[0].knee_per_s / 100 * (low + (high - low) * (well - share) / (well - badly))
    return None


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Markdown: each figure as real, simulated, error; of the percentile that accidents change most also by how much
    (`plan.check.Comparison`)."""
    yield "| workload | drafts | load | requests | " + " | ".join(SHOWN.values()) + " | others |"
    yield "|---" * (len(SHOWN) + 5) + "|"
    for cell in sorted(cells, key=lambda cell: cell.name):
        figures = " | ".join(_figure(cell, name) for name in SHOWN)
        drafts = "on" if cell.drafts else "off"
        yield f"| {cell.workload} | {drafts} | {cell.load} % | {cell.n_requests} | {figures} | {cell.others:.2f} |"
    yield ""
    for workload in sorted({cell.workload for cell in cells}):
        own = [cell for cell in cells if cell.workload == workload and not cell.drafts]
        real, simulated = knee(own, simulated=False), knee(own, simulated=True)
        if real is None or simulated is None:
            yield f"{workload}: the promise breaks at none of these loads, or at all, so there is no knee to compare"
        else:
            within = f"{own[0].limits.ttft_limit_s:.2g} s to the first token"
            yield f"{workload}: knee {real:.3g}/s, simulated {simulated:.3g}/s ({simulated / real - 1:+.0%}), {within}"
    for title, chosen in (
        ("up to 65 %", [cell for cell in cells if cell.load < UNSTABLE_LOAD]),
        ("above", [cell for cell in cells if cell.load >= UNSTABLE_LOAD]),
    ):
        yield from _summary(title, chosen)


def _figure(cell: Cell, name: str) -> str:
    real, simulated = cell.real.get(name, 0.0), cell.simulated.get(name, 0.0)
    error = error_of(real, simulated)
    if name in MILLISECONDS:
        real, simulated = 1000 * real, 1000 * simulated
    said = "" if error is None else f" ({error:+.0%})"
    if said and name == "ttft_p95_s":
        said += f" ±{cell.accidents.get(name, 0.0):.0%}"
    return f"{real:,.4g} / {simulated:,.4g}{said}"


def _summary(title: str, cells: Sequence[Cell]) -> Iterator[str]:
    """How many of the errors are small, and the largest ones."""
    for name, words in SHOWN.items():
        errors = [error_of(cell.real.get(name, 0.0), cell.simulated.get(name, 0.0)) for cell in cells]
        known = [error for error in errors if error is not None]
        if known:
            n_good = sum(abs(error) <= ALLOWED for error in known)
            yield (
                f"{title} of the knee, {words}: {n_good} of {len(known)} within {ALLOWED:.0%}, "
                f"{min(known):+.0%} to {max(known):+.0%}"
            )


def _names(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


@click.command()
@click.argument("name", metavar="MODEL")
@click.option("--out", "path", type=click.Path(dir_okay=False, path_type=Path), default="build/plan-accuracy.jsonl",
              show_default=True, help="Where comparisons are kept.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=1), default=25.0, show_default=True,
              help="About how long all of it takes; longer where a run would have fewer than 16 requests.")  # fmt: skip
@click.option("--loads", type=NumberList(), default=LOADS, show_default=True, help="In percent of the knee.")
@click.option("--workloads", callback=_names, default="mixed,agents,bursts", show_default=True, help="Which of them.")
@click.option("--drafts", callback=_names, default="off,on", show_default=True, help="on, off or both.")
@click.option("--table", "is_table", is_flag=True, help="Only print what is kept.")
def main(
    name: str, path: Path, minutes: float, loads: tuple[int, ...], workloads: list[str], drafts: list[str],
    is_table: bool,
) -> int:  # fmt: skip
    """Compare forecasts for MODEL with real runs. This machine should have nothing else to do."""
    if not is_table:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # no daemon is left behind
        try:
            wanted = [
                (workload, each == "on", load)
                for workload, each, load in itertools.product(workloads, drafts, loads)
                if each == "off" or load < MOST_DRAFTED_LOAD
            ]
            _fill(name, path, max(1.0, 60 * minutes / max(1, len(wanted)) - OVERHEAD_S), wanted)
        except KeyboardInterrupt:
            progress("interrupted; the same command goes on from here")
        except LocalrunError as error:
            raise click.ClickException(error.message) from None
    print("\n".join(table(read(path))))
    return exits.OK


def _fill(name: str, path: Path, seconds: float, wanted: Sequence[tuple[str, bool, int]]) -> None:
    files = msgspec.toml.decode(WORKLOADS.read_bytes(), type=dict[str, WorkloadFile])
    unknown = {workload for workload, _, _ in wanted} - files.keys()
    if unknown:
        raise BadRequest(f"--workloads: {', '.join(sorted(unknown))}; there are {', '.join(files)}")
    model, settings = model_and_settings(name)
    calibration = calibration_of(model, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    comparisons = Comparisons(model, settings, calibration, path, seconds)
    done = {cell.name for cell in read(path, calibration.made_at)}
    began_s = time.monotonic()
    for workload, drafts, load in wanted:
        if (workload, drafts, load) in done:
            continue
        try:
            comparisons.add(files[workload].workload(workload), load, drafts=drafts)
        except LocalrunError as error:  # the next run tries it again
            progress(f"{workload}, {load} %: {error.message}")
    progress(f"done, after {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
