"""Measuring this machine with one model, and the file that keeps what came out.

An engine's process measures steps, prompts and copies (`engine/tools/step_costs.py`), the engine's own work is a
simulation whose backend takes no time, by the real clock, and what the daemon takes is the difference to a few streams
of one of our own. A calibration holds for a machine, a model, a build of llama.cpp and settings; with others there is
another file.
"""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from localrun import config, stored, wire
from localrun.bench.arrivals import Session, Turn, as_sent, send
from localrun.bench.metrics import gaps_s, percentile
from localrun.bench.results import StreamRecord
from localrun.bench.servers import ServerProcess
from localrun.bench.session import own_server
from localrun.config import Settings
from localrun.errors import CannotFit, EngineFailed, LocalrunError
from localrun.hardware import thread_choice
from localrun.hardware.memory import machine_memory
from localrun.hardware.processors import usable
from localrun.models.fit import FitRequest, Machine, choose
from localrun.models.storage.model import Model
from localrun.plan.backend import Layout
from localrun.plan.costs import Costs, PromptCosts, Sample, StreamCosts, WaitCosts, errors_of
from localrun.plan.replica import Setup, simulate
from localrun.processes import HIDDEN

VERSION = 4
FOLDER = "calibrations"
SECONDS = 30.0
PROBE_SECONDS = 6.0
MOST_CHECKS = 20
# A fit is not worth keeping whose median error is larger.
MOST_ERROR = 0.10
# Times vary by no more than this, whatever repeats say.
_MOST_SIGMA = 0.3
# What a daemon is asked for, so many times or until so much time is over, and how long the steps without one are
# measured in between. A large model takes seconds to load each time.
_N_PROMPT, _N_OUTPUT = 50, 64
_N_ROUNDS, _ROUNDS_SECONDS = 3, 12.0
_STEADY_SECONDS = 2.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """How far a simulation was off, by metric: 0.1 is 10 % too high. `others` is how many processors other programs
    took meanwhile, `slowdown` how many times as long as when it was calibrated the machine took for prompts, which is
    taken into account."""

    at: str
    workload: str
    rate_per_s: float
    errors: dict[str, float]
    others: float
    slowdown: float = 1.0


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """`median_error` and `worst_error` are those of the fit, `others` as in `Check`."""

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)] = VERSION
    made_at: str
    machine: str
    model: str
    build: str
    layout: Layout
    costs: Costs
    median_error: float
    worst_error: float
    others: float
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        if self.layout.n_batch < self.layout.slots:
            raise ValueError("a batch has a row for each slot")

    @property
    def is_disturbed(self) -> bool:
        return self.others > thread_choice.MOST_OTHERS


def path_of(model: Model, settings: Settings) -> Path:
    """Where the calibration of a model lies, on this machine and with these settings."""
    held = (
        usable().identity,
        model.digest,
        version("llama-cpp-python"),
        [settings.slots, settings.kv_cells, settings.kv_type, settings.threads, settings.gpu_layers],
        settings.batch_tokens,
    )
    name = hashlib.sha256(msgspec.json.encode(held)).hexdigest()[:24]
    return config.folders().data / FOLDER / f"{name}.json"


def kept(path: Path) -> Calibration | None:
    """What is kept there; None for nothing, for a file of another version, and for one of nonsense."""
    return stored.read(path, _decoder)


_decoder = msgspec.json.Decoder(Calibration)


def keep(path: Path, calibration: Calibration) -> None:
    """Raises OSError."""
    stored.write(path, calibration)


def keep_check(path: Path, calibration: Calibration, check: Check) -> None:
    """Add what a comparison with a real daemon said. Raises OSError."""
    keep(path, msgspec.structs.replace(calibration, checks=(*calibration.checks, check)[-MOST_CHECKS:]))


def settings_for(model: Model, settings: Settings) -> Settings:
    """As the daemon would load it: its own parameters, its table of the settings file, all settings."""
    return settings.with_load(model.load.over(settings.of_model(model.name)))


def setup_of(calibration: Calibration, settings: Settings) -> Setup:
    return Setup.of(calibration.layout, calibration.costs, settings)


def open_message(model: Model, settings: Settings) -> wire.Open:
    """The frame that an engine would be opened with. Raises CannotFit."""
    machine = Machine(machine_memory().available_bytes)
    wish = FitRequest(
        n_slots=settings.slots, n_kv_cells=settings.kv_cells, kv_type=settings.kv_type, n_ubatch=settings.batch_tokens
    )
    fit = choose(model.header, machine, wish)
    if not fit.fits and not settings.gpu_layers:
        raise CannotFit(f"{model.name} does not fit this machine's memory; `localrun show {model.name} --fit` says why")
    return wire.Open(
        model_path=str(model.path),
        n_slots=fit.n_slots,
        n_kv_cells=fit.n_kv_cells,
        n_batch=settings.batch_tokens,
        n_threads=settings.threads,
        n_gpu_layers=settings.gpu_layers,
        kv_type=fit.kv_type,
        target_itl_s=settings.target_itl_s,
        ram_cache_bytes=settings.ram_cache_bytes,
        max_queue=settings.max_queue,
        n_layers=model.header.n_layers,
        weights_bytes=model.header.weights_bytes,
        kv_bytes=fit.estimate.kv_bytes,
        model=model.name,
        threads_file=str(config.folders().cache / thread_choice.FILE_NAME),
        later_shards=tuple(map(str, model.header.shard_paths[1:])),
    )


class Speed(NamedTuple):
    """How many times as long as in a calibration things take: a machine's clock and its neighbours change."""

    prompts: float
    decode: float

    @classmethod
    def now(cls, model: Model, settings: Settings, calibration: Calibration) -> Speed:
        """Measured anew, in `PROBE_SECONDS`. Raises what `calibrate` does."""
        costs, *_ = fitted(_measured(open_message(model, settings), model, PROBE_SECONDS)[1:-1], calibration.layout)
        return cls.between(calibration.costs, costs)

    @classmethod
    def between(cls, known: Costs, now: Costs) -> Speed:
        """In so little time not every number of streams is measured, and what lies beyond is on no line."""
        both = sorted(set(now.streams.streams) & set(known.streams.streams))
        steps = [now.streams.step_s(n, 64.0 * n) / known.streams.step_s(n, 64.0 * n) for n in both]
        return cls(now.background.batch_s(512, 0) / known.background.batch_s(512, 0), statistics.median(steps))


class _Line(msgspec.Struct):
    """Of `step_costs`."""

    phase: str = ""
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    spread: float = 0.0
    quantiles: tuple[float, ...] = ()
    build: str = ""
    layout: Layout | None = None
    others: float | None = None


def calibrate(model: Model, settings: Settings, tell: Callable[[str], None]) -> Calibration:
    """Measure and fit. `tell` is told what is being done. Raises EngineFailed where the engine's side fails, and
    LocalrunError for a fit that is worth nothing."""
    tell(f"measuring steps and prompts of {model.name}, about {SECONDS:.0f} s")
    opened = open_message(model, settings)
    lines = _measured(opened, model, SECONDS)
    if lines[0].layout is None or lines[-1].others is None:
        raise EngineFailed(f"{model.name} cannot be measured: its process ended early")
    layout = lines[0].layout
    costs, median_error, worst_error = fitted(lines[1:-1], layout)
    if median_error > MOST_ERROR:
        raise LocalrunError(
            f"the fit is {median_error:.0%} off, so a forecast would say nothing; other programs took "
            f"{lines[-1].others:.1f} processors meanwhile: measure again without them"
        )
    host_s, host_row_s = host_costs(layout)
    costs = msgspec.structs.replace(costs, host_s=host_s, host_row_s=host_row_s)
    tell("measuring what the daemon takes")
    costs = _with_daemon(costs, layout, model, settings, opened)
    return Calibration(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=usable().identity,
        model=model.name,
        build=lines[0].build,
        layout=layout,
        costs=costs,
        median_error=median_error,
        worst_error=worst_error,
        others=lines[-1].others,
    )


def _measured(opened: wire.Open, model: Model, seconds: float, *options: str) -> list[_Line]:
    command = [sys.executable, "-P", "-m", "localrun.engine.tools.step_costs", "--seconds", str(seconds)]
    command += ["--heads", str(model.header.n_heads), *options]
    # Ctrl-C is for this process, which kills that one.
    done = subprocess.run(
        command, input=msgspec.json.encode(opened), stdout=subprocess.PIPE, start_new_session=True, check=False,
        **HIDDEN,
    )  # fmt: skip
    if done.returncode != 0:
        raise EngineFailed(f"{model.name} cannot be measured: its process ended with status {done.returncode}")
    return [msgspec.json.decode(line, type=_Line) for line in done.stdout.splitlines()]


def fitted(lines: list[_Line], layout: Layout) -> tuple[Costs, float, float]:
    """Costs, with the median and the largest error of their fit. Raises LocalrunError if something is missing."""
    of: dict[str, list[Sample]] = {}
    for line in lines:
        of.setdefault(line.phase, []).append(Sample(line.rows, line.tokens, line.seconds))
    streams = fitted_streams(lines)
    measured = of.get("background", []) + of.get("beside", [])
    prompts = PromptCosts.fitted(measured, layout.n_heads, layout.n_threads)
    lines_of = msgspec.structs.replace(streams, points=())  # which go through what was measured, whatever it is
    predicted = {sample: lines_of.step_s(sample.n_rows, sample.tokens) for sample in of["streams"]}
    predicted |= {sample: prompts.batch_s(sample.n_rows, sample.tokens) for sample in measured}
    waits = dict(sorted((line.seconds, line.quantiles) for line in lines if line.phase == "waits"))
    cold = of["batch"][0].seconds / of["waits"][0].seconds if waits else 1.0
    copy_s, copy_token_s = copy_line(of.get("copy", []))
    sigma = statistics.median(line.spread for line in lines if line.phase == "streams")
    costs = Costs(
        streams=streams,
        background=prompts,
        beside=prompts,
        # Of several streams none has a tile for itself.
        drafts=PromptCosts.line(of["drafts"]) if "drafts" in of else None,
        alone_drafts=PromptCosts.fitted(of["alone_drafts"], layout.n_heads, layout.n_threads)
        if "alone_drafts" in of
        else None,
        waits=WaitCosts(tuple(waits), tuple(waits.values())) if waits else None,
        cold=min(2.0, max(1.0, cold)),
        copy_s=copy_s,
        copy_token_s=copy_token_s,
        save_token_s=copy_line(of.get("save", []))[1],
        restore_token_s=copy_line(of.get("restore", []))[1],
        disk_byte_s=of["disk"][0].seconds / of["disk"][0].tokens if "disk" in of else Costs.disk_byte_s,
        rebuild_s=of["rebuild"][0].seconds if "rebuild" in of else 0.2,
        sigma=min(_MOST_SIGMA, sigma),
    )
    return costs, *errors_of(predicted)


def fitted_streams(lines: Sequence[_Line]) -> StreamCosts:
    """Raises LocalrunError without such lines."""
    return StreamCosts.fitted(Sample(line.rows, line.tokens, line.seconds) for line in lines if line.phase == "streams")


def copy_line(copies: Sequence[Sample]) -> tuple[float, float]:
    """What a copy takes, and each of its tokens, by the shortest and the longest one."""
    if not copies:
        return 0.0, 0.0
    first, last = copies[0], copies[-1]
    slope = (last.seconds - first.seconds) / max(1.0, last.tokens - first.tokens)
    token_s = slope if slope > 0 else first.seconds / first.tokens
    return max(0.0, first.seconds - token_s * first.tokens), token_s


def host_costs(layout: Layout) -> tuple[float, float]:
    """What the engine's own work takes: seconds of a step, and more for each stream."""
    nothing = PromptCosts(0.0, 0.0, 0.0)
    costs = Costs(streams=StreamCosts((1,), (0.0,), (0.0,)), background=nothing, beside=nothing, host_s=1e-6)
    setup = Setup(layout, costs, 0.0, 0, 256)
    found = []
    for n_streams in sorted({1, layout.slots}):
        turn = Turn((("host", 16),), 400)
        best_s = float("inf")
        for _ in range(3):
            began_s = time.perf_counter()
            outcome = simulate(setup, [Session(0.0, (turn,)) for _ in range(n_streams)], 1.0)
            best_s = min(best_s, (time.perf_counter() - began_s) / outcome.n_steps)
        found.append((n_streams, best_s))
    (few, few_s), (many, many_s) = found[0], found[-1]
    row_s = max(0.0, (many_s - few_s) / (many - few)) if many > few else 0.0
    return max(1e-6, few_s - few * row_s), row_s


def _with_daemon(costs: Costs, layout: Layout, model: Model, settings: Settings, opened: wire.Open) -> Costs:
    """The same streams with a daemon and without: what is missing in a gap between tokens is what the engine does
    beside computing, and what the daemon takes from the processors that compute; what is missing in a first token is
    the way of a request. Steps are measured again in turn with the daemon's: a machine whose clock changes by a tenth
    would hide all of it."""
    missing: dict[int, list[float]] = {}
    requests: list[float] = []
    with daemon(model, settings, layout) as server:
        before, ends_s = _streams_now(opened, model), time.monotonic() + _ROUNDS_SECONDS
        for number in range(_N_ROUNDS):
            found = {n: _sent(server, n, number) for n in sorted({1, layout.slots})}
            after = _streams_now(opened, model)
            for n_streams, records in found.items():
                alone_s = statistics.mean(each.step_s(n_streams, _N_PROMPT * n_streams) for each in (before, after))
                slower = alone_s / costs.streams.step_s(n_streams, _N_PROMPT * n_streams)
                now = costs.scaled(prompts=slower, decode=slower)
                setup = Setup(layout, now, settings.target_itl_s, settings.ram_cache_bytes, settings.max_queue, False)
                simulated = simulate(setup, as_sent(_few(n_streams, number)), 1.0).records
                missing.setdefault(n_streams, []).append(max(0.0, _gap_s(records) - _gap_s(simulated)))
                if n_streams == 1:
                    requests.append(max(0.0, records[0].ttft_s - simulated[0].ttft_s))
            before = after
            if time.monotonic() > ends_s:
                break
    step_s, delta_s = daemon_costs({n_streams: statistics.median(each) for n_streams, each in missing.items()})
    return msgspec.structs.replace(
        costs, host_s=costs.host_s + step_s, delta_s=delta_s, request_s=statistics.median(requests)
    )


def daemon(model: Model, settings: Settings, layout: Layout) -> AbstractContextManager[ServerProcess]:
    """One of our own, with the layout that was calibrated."""
    return own_server(
        model.path, slots=layout.slots, kv_cells=layout.n_cells, threads=layout.n_threads, latency=settings.latency
    )


def _few(n_streams: int, number: int) -> list[Session]:
    return [Session(0.0, (Turn(((f"{number}/{each}", _N_PROMPT),), _N_OUTPUT),)) for each in range(n_streams)]


def _sent(server: ServerProcess, n_streams: int, number: int) -> list[StreamRecord]:
    """Raises LocalrunError for a request that was not answered."""
    records = send(server.target, _few(n_streams, number), 1.0, number).records
    if problem := next((record.problem for record in records if not record.is_complete), ""):
        raise LocalrunError(f"the daemon did not answer: {problem}")
    return records


def _streams_now(opened: wire.Open, model: Model) -> StreamCosts:
    return fitted_streams(_measured(opened, model, _STEADY_SECONDS, "--steady")[1:-1])


def _gap_s(records: Sequence[StreamRecord]) -> float:
    return percentile([gap for record in records for gap in gaps_s(record.arrivals_s)], 50)


def daemon_costs(missing_s: Mapping[int, float]) -> tuple[float, float]:
    """What a step takes longer, and each of its tokens, if a step of so many streams takes so much longer."""
    few, many = min(missing_s), max(missing_s)
    if few == many:
        return 0.0, missing_s[few] / few
    token_s = max(0.0, (missing_s[many] - missing_s[few]) / (many - few))
    return max(0.0, missing_s[few] - few * token_s), token_s
