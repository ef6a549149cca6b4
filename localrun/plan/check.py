"""Whether a forecast is true: the same requests against a daemon of our own and in a simulation, side by side.

Both become the same records, and one function makes the figures of both (`bench.metrics.stream_metrics`). What the
machine takes is measured before and after, because it may not be as quick as when it was calibrated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from localrun.bench.arrivals import Limits, Sent, Session, Workload, as_sent, send
from localrun.bench.metrics import is_good, stream_metrics
from localrun.bench.results import Metrics, StreamRecord
from localrun.bench.servers import ServerProcess
from localrun.config import Settings
from localrun.errors import BadRequest, LocalrunError
from localrun.hardware.processors import others_busy_s
from localrun.models.storage.model import Model
from localrun.plan.calibration import Calibration, Check, Speed, daemon, setup_of
from localrun.plan.replica import Setup, simulate

# These are sent first, and do not count.
N_WARM = 8
LEAST_REQUESTS = 40
# A daemon answers them one by one, in real time.
MOST_REQUESTS = 20_000
MOST_SECONDS = 86_400.0
# A percentile of some dozens of requests is an accident: with times that vary by 6 %, the same ones on the same machine
# had a time to first token, in 95 of 100, that was up to 20 % longer or shorter. So the median of so many counts.
N_SIMULATED = 5
# What is compared, with its unit.
COMPARED = {
    "tokens_per_s": "tok/s",
    "ttft_p50_s": "s",
    "ttft_p95_s": "s",
    "itl_p50_s": "s",
    "itl_p95_s": "s",
    "tpot_p50_s": "s",
    "cached_tokens": "tokens",
    "drafted_tokens": "tokens",
    "kept": "of 1",
}


class Comparison(NamedTuple):
    """Figures of both by name, and what is kept of their differences. `accidents` is how far simulations that differ
    in nothing but small accidents are apart, at most, as a share of their median."""

    real: Metrics
    simulated: Metrics
    check: Check
    accidents: Metrics


class Real(NamedTuple):
    """What a daemon made of requests; `others` is as in `Check`."""

    sent: Sent
    others: float


def compare(
    model: Model,
    settings: Settings,
    calibration: Calibration,
    workload: Workload,
    sessions: Sequence[Session],
    *,
    rate_per_s: float,
    seed: int,
    tell: Callable[[str], None],
) -> Comparison:
    """With sessions as of `asked_of`. Raises LocalrunError where the daemon does not start, or a request fails."""
    n_requests = sum(len(session.turns) for session in sessions)
    speeds = [Speed.now(model, settings, calibration)]
    tell(f"{workload.name}: {n_requests} requests, {rate_per_s:.3g} a second, to a daemon of our own")
    setup = setup_of(calibration, settings)
    with daemon(model, settings, calibration.layout) as server:
        real = run(server, sessions, rate_per_s, seed, speculates=setup.speculates)
    speeds.append(Speed.now(model, settings, calibration))
    return compared(real, setup, workload, sessions, rate_per_s, seed, speeds)


def asked_of(workload: Workload, rate_per_s: float, seconds: float, seed: int) -> list[Session]:
    """What is asked of both. Raises BadRequest for what takes longer than anybody waits, and for too few to compare."""
    n_requests = max(LEAST_REQUESTS, round(min(rate_per_s * seconds, 1e18)))
    sessions = as_sent(workload.sessions(min(n_requests, MOST_REQUESTS + 1), seed))
    n_found = sum(len(session.turns) for session in sessions)
    if workload.own_rate_per_s is not None:  # a trace has no more than it has
        n_requests = n_found
    if n_requests > MOST_REQUESTS or n_requests / rate_per_s > MOST_SECONDS:
        raise BadRequest(
            f"--rate {rate_per_s:g} for --seconds {seconds:g} are {n_requests:,} requests in "
            f"{n_requests / rate_per_s / 3600:.3g} hours; at most {MOST_REQUESTS:,} are sent, within a day, and at "
            f"least {LEAST_REQUESTS} of a workload that has them",
            field="rate",
        )
    if n_found < 2 * N_WARM:
        raise BadRequest(
            f"{n_found} requests of {workload.name} are too few to compare: the first {N_WARM} do not count, and as "
            "many are the least that do",
            field="workload",
        )
    return sessions


def run(server: ServerProcess, sessions: Sequence[Session], rate_per_s: float, seed: int, *, speculates: bool) -> Real:
    """Raises what `send` raises."""
    began_s, others_s = time.perf_counter(), others_busy_s() - server.busy_s()
    sent = send(server.target, sessions, rate_per_s, seed, speculates=speculates)
    others = (others_busy_s() - server.busy_s() - others_s) / (time.perf_counter() - began_s)
    return Real(sent, max(0.0, others))


def compared(
    real: Real,
    setup: Setup,
    workload: Workload,
    sessions: Sequence[Session],
    rate_per_s: float,
    seed: int,
    speeds: Sequence[Speed],
) -> Comparison:
    """With a simulation on a machine as quick as this one was. Raises LocalrunError if a request failed."""
    setup = scaled(setup, speeds)
    figures_of = figures(real.sent.records, workload.limits)
    each = [
        figures(
            simulate(setup, sessions, rate_per_s, seed=seed + number, texts=real.sent.texts).records, workload.limits
        )
        for number in range(N_SIMULATED)
    ]
    simulated = {name: statistics.median(one.get(name, 0.0) for one in each) for name in each[0]}
    accidents = {
        name: (max(one[name] for one in each) - min(one[name] for one in each)) / median
        for name, median in simulated.items()
        if median
    }
    check = Check(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=workload.name,
        rate_per_s=rate_per_s,
        errors={
            name: simulated[name] / figures_of[name] - 1
            for name in COMPARED
            if figures_of.get(name) and name in simulated
        },
        others=real.others,
        slowdown=statistics.geometric_mean(speed.prompts for speed in speeds),
    )
    return Comparison(figures_of, simulated, check, accidents)


def scaled(setup: Setup, speeds: Sequence[Speed]) -> Setup:
    """A machine that is as quick as it was found to be."""
    prompts, decode = (statistics.geometric_mean(each) for each in zip(*speeds, strict=True))
    return setup._replace(costs=setup.costs.scaled(prompts=prompts, decode=decode))


def figures(records: Sequence[StreamRecord], limits: Limits) -> Metrics:
    """Of those behind the first. Raises LocalrunError if one did not complete."""
    counted = sorted(records, key=lambda record: record.intended_at_s)[N_WARM:]
    failed = next((record.problem for record in counted if not record.is_complete), "")
    if failed:
        raise LocalrunError(f"a request did not complete, so there is nothing to compare: {failed}")
    metrics = stream_metrics("", counted)
    metrics["tokens_per_s"] = sum(record.n_output for record in counted) / metrics["wall_s"]
    metrics["drafted_tokens"] = sum(record.n_accepted for record in counted)
    metrics["kept"] = statistics.mean(
        is_good(record, ttft_limit_s=limits.ttft_limit_s, itl_limit_s=limits.itl_limit_s) for record in counted
    )
    return metrics
