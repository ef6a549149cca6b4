"""A fleet of three against a cluster of three: the same trace, behind the door's own router, on replicas whose steps
take a known time. `-s` prints both."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from localrun import wire
from localrun.bench.arrivals import ANSWER, Session, Turn, as_sent
from localrun.bench.metrics import percentile
from localrun.bench.report import aligned
from localrun.bench.results import StreamRecord
from localrun.bench.streams import numbers
from localrun.cluster.door import App, ClusterLender
from localrun.cluster.link import ClusterLink
from localrun.config import Settings
from localrun.engine.process import SPARE_SEQUENCES
from localrun.plan.costs import PromptCosts, StreamCosts
from localrun.plan.fleet import fleet
from localrun.plan.replica import Setup
from localrun.server.jobs.job import JobRequest
from localrun.server.runtime import Runtime
from tests.cluster.test_link import Machine
from tests.cluster.test_wire import HELLO
from tests.plan.made import costs, layout
from tests.server.conftest import home, models_dir, running, settings, small_model

__all__ = ["home", "models_dir", "running", "settings", "small_model"]

STEP_S, ROW_S = 0.030, 2e-4
N_REPLICAS, N_TALKS, RATE_PER_S = 3, 36, 8.0
N_CELLS = 8192


class Played(NamedTuple):
    """What came of a trace. `load` is each replica's share of the prompts' tokens, the largest first."""

    tokens_per_s: float
    cached_tokens: int
    ttft_p50_s: float
    load: list[float]


def played(records: Sequence[StreamRecord], prompt_tokens: Sequence[int]) -> Played:
    assert all(record.is_complete for record in records)
    seconds = max(record.arrivals_s[-1] for record in records) - min(record.intended_at_s for record in records)
    return Played(
        sum(record.n_output for record in records) / seconds,
        sum(record.n_cached for record in records),
        percentile([record.ttft_s for record in records], 50),
        sorted((tokens / sum(prompt_tokens) for tokens in prompt_tokens), reverse=True),
    )


def talks() -> list[Session]:
    """Conversations that repeat what was said. There are many systems: which replica a single one goes to is luck."""
    found = []
    for number in range(N_TALKS):
        system = number % 13
        parts: list[tuple[str, int]] = [(f"system{system}", 200 + 20 * system)]
        turns = []
        for turn in range(4):
            parts.append((f"{number}/{turn}", 40 + 37 * (number + turn) % 160))
            think_s = 0.4 + 0.1 * (number % 5) if turn else 0.0
            turns.append(Turn(tuple(parts), 8 + (number + 3 * turn) % 16, think_s, f"talk{number}"))
            parts.append((f"{number}/{turn}{ANSWER}", turns[-1].n_output))
        found.append(Session(4.0 * number, tuple(turns)))
    return as_sent(found)


@pytest.fixture
async def machines(models_dir: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Machine]]:
    monkeypatch.setenv("LOCALRUN_FAKE_STEP_MS", str(1000 * STEP_S))
    monkeypatch.setenv("LOCALRUN_FAKE_ROW_US", str(1e6 * ROW_S))
    machines = [Machine(models_dir, f"node{number}") for number in range(N_REPLICAS)]
    await asyncio.gather(*(machine.start() for machine in machines))
    yield machines
    await asyncio.gather(*(machine.stop() for machine in machines))


async def asked(runtime: Runtime, turn: Turn, at_s: float) -> tuple[StreamRecord, str]:
    """What came of a request that was to be sent at that time, and which node answered it."""
    record = StreamRecord(intended_at_s=at_s, sent_at_s=time.perf_counter(), status=200)
    tokens = [number % 256 for name, n_tokens in turn.parts for number in numbers(1, name, n_tokens)]
    submit = wire.Submit(id=0, sampling=wire.Sampling(temperature=0), n_predict=turn.n_output, ignore_eos=True)
    async with runtime.job(JobRequest(model="alpha", api="/test", client=turn.client)) as job:
        await job.submit(submit, segments=[wire.Segment("", tokens=tuple(tokens))])
        async for delta in job:
            if delta.tokens:
                record.arrivals_s.append(time.perf_counter())
            if delta.usage is not None:
                record.n_cached, record.n_output = delta.usage.n_cached, delta.usage.n_output
        return record, job.record.node


async def on_cluster(runtime: Runtime, sessions: Sequence[Session]) -> Played:
    records, load = list[StreamRecord](), Counter[str]()
    start_s = time.perf_counter()

    async def talk(session: Session) -> None:
        at_s = start_s + session.at / RATE_PER_S
        for turn in session.turns:
            await asyncio.sleep(max(0.0, at_s + turn.think_s - time.perf_counter()))
            record, node = await asked(runtime, turn, at_s + turn.think_s)
            load[node] += turn.n_prompt
            records.append(record)
            at_s = time.perf_counter()

    await asyncio.gather(*map(talk, sessions))
    return played(records, [load[f"node{number}"] for number in range(N_REPLICAS)])


async def way_s(runtime: Runtime) -> float:
    """How long a request is on its way, as a calibration finds it out: what is missing when it is alone."""
    found = []
    for number in range(6):
        record, _ = await asked(runtime, Turn(((f"alone{number}", 100),), 2), time.perf_counter())
        found.append(record.ttft_s - STEP_S - 100 * ROW_S)
    return max(0.0, min(found))


def on_fleet(sessions: Sequence[Session], request_s: float) -> Played:
    usual = Settings()
    same = layout(
        slots=usual.slots,
        n_cells=N_CELLS,
        n_spare_seqs=SPARE_SEQUENCES,
        is_split=False,
        mixes_rows=True,
        state_token_bytes=5,
    )
    of = costs(
        streams=StreamCosts((1, 8), (STEP_S + ROW_S, STEP_S + 8 * ROW_S), (0.0, 0.0)),
        beside=PromptCosts(STEP_S, ROW_S, 0.0),
        request_s=request_s,
    )
    setup = Setup(same, of, usual.target_itl_s, usual.ram_cache_bytes, usual.max_queue)
    found = fleet(setup, sessions, RATE_PER_S, n_replicas=N_REPLICAS, router="prefix")
    return played(found.records, found.prompt_tokens)


async def test_a_fleet_does_what_a_cluster_does(running: Any, machines: list[Machine]) -> None:
    sessions = talks()
    async with running() as runtime:
        link = ClusterLink(model="alpha", hello=HELLO, on_step=lambda *_: None)
        link.replicas({machine.node: machine.address for machine in machines})
        app = App(runtime.store.resolve("alpha"), "fingerprint", link)
        runtime.jobs.lender = ClusterLender(runtime.supervisor, lambda name: app if name == "alpha" else None)
        request_s = await way_s(runtime)
        real = await on_cluster(runtime, sessions)
        await link.stop()
    simulated = on_fleet(sessions, request_s)
    rows = [
        [
            name,
            *(" ".join(f"{value:.4g}" for value in ([one] if isinstance(one, int | float) else one)) for one in both),
        ]
        for name, *both in zip(Played._fields, real, simulated, strict=True)
    ]
    print("\n" + "\n".join(aligned(["", "cluster", "fleet"], rows)))
    assert simulated.tokens_per_s == pytest.approx(real.tokens_per_s, rel=0.15)
    # The time to a first token is shown only: whatever else this machine does comes on top of it.
    assert simulated.cached_tokens == pytest.approx(real.cached_tokens, rel=0.15)
    assert simulated.load == pytest.approx(real.load, abs=0.1)
