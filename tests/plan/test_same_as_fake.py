"""The strongest test of the simulated protocol: the same requests, on the fake backend and on the simulated one with
equal costs, give the same plans, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import Batch
from localrun.plan.backend import N_TOKENS, SimBackend, SimWorker
from localrun.plan.clock import Account, VirtualClock
from localrun.plan.costs import Costs, PromptCosts, StreamCosts
from localrun.plan.real import as_sent
from localrun.plan.replica import Replica, Setup
from localrun.plan.workload import ANSWER, Session, Turn
from localrun.wire import Lane
from tests.fakes.backend import FakeBackend, FakeWorker
from tests.plan.made import layout

STEP_S, BESIDE_S, ROW_S = 0.002, 0.001, 1e-4
COSTS = Costs(
    streams=StreamCosts((1,), (STEP_S,), (0.0,)),
    background=PromptCosts(0.0, ROW_S, 0.0),
    beside=PromptCosts(BESIDE_S, ROW_S, 0.0),
    rebuild_s=0.0,
)
N_BATCH, TOKEN_BYTES = 64, 3

Rows = tuple[str, list[int], list[int]]


def rows_of(kind: str, batch: Batch, n_rows: int) -> Rows:
    return kind, (batch.seq[:n_rows] + batch.first_seq).tolist(), batch.pos[:n_rows].tolist()


class Recorded(SimBackend):
    """`plans` has the rows of every call."""

    plans: list[Rows]

    def decode(self, n_rows: int, should_abort: Callable[[], bool] | None = None) -> None:
        self.plans.append(rows_of("step", self.batch, n_rows))
        super().decode(n_rows, should_abort)

    def _empty(self) -> None:
        super()._empty()
        if self.worker is not None:
            self.worker = RecordedWorker(self, self.worker.n_seqs)


class RecordedWorker(SimWorker):
    def start(self, n_rows: int) -> None:
        assert isinstance(self._backend, Recorded)
        self._backend.plans.append(rows_of("batch", self.batch, n_rows))
        super().start(n_rows)


class TimedFake(FakeBackend):
    """The fake, whose calls take virtual time."""

    n_vocab = N_TOKENS
    worker: TimedWorker | None

    def __init__(self, *, slots: int, n_cells: int, is_split: bool, clock: VirtualClock) -> None:
        self.plans: list[Rows] = []
        self.clock = clock
        super().__init__(
            n_cells=n_cells,
            n_seqs=slots + 4,
            n_batch=N_BATCH,
            n_slots=slots if is_split else 0,
            n_background_seqs=max(slots, 4),
            worker=TimedWorker,
        )

    def decode(self, n_rows: int, should_abort: Callable[[], bool] | None = None) -> None:
        self.plans.append(rows_of("step", self.batch, n_rows))
        counts: dict[int, int] = {}
        for seq in self.batch.seq[:n_rows].tolist():
            counts[seq] = counts.get(seq, 0) + 1
        n_streams = sum(n == 1 for n in counts.values())
        n_prompt = n_rows - n_streams
        if self.worker is not None:
            self.worker.go_on()
        step_s = STEP_S if n_streams else 0.0
        self.clock.spend(step_s, Account.DECODE)
        if n_prompt and self.mixes_rows:
            self.clock.spend(max(0.0, BESIDE_S + ROW_S * n_rows - step_s), Account.PROMPTS)
        elif n_prompt:
            self.clock.spend(BESIDE_S + ROW_S * n_prompt, Account.PROMPTS)
        if self.worker is not None:
            self.worker.seen_s = self.clock.now_s
        super().decode(n_rows)


class TimedWorker(FakeWorker):
    """Its batch is over when its time has passed outside of steps."""

    left_s = seen_s = 0.0

    @property
    def _fake(self) -> TimedFake:
        assert isinstance(self._backend, TimedFake)
        return self._backend

    @property
    def ends_at_s(self) -> float:
        return self.seen_s + self.left_s

    def start(self, n_rows: int) -> None:
        self._fake.plans.append(rows_of("batch", self.batch, n_rows))
        super().start(n_rows)
        self.left_s, self.seen_s = ROW_S * n_rows, self._fake.clock.now_s

    def go_on(self) -> None:
        self.left_s -= min(self.left_s, self._fake.clock.now_s - self.seen_s)
        self.seen_s = self._fake.clock.now_s

    def is_over(self) -> bool:
        if self.is_busy:
            self.go_on()
        return self.left_s <= 1e-9

    def finish(self) -> None:
        self.n_looks_left = 0
        super().finish()


PARTS = [("system", 100), ("tools", 40), ("greeting", 20)]


@st.composite
def some_sessions(draw: st.DrawFn) -> list[Session]:
    sessions = []
    for number in range(draw(st.integers(1, 8))):
        parts = draw(st.lists(st.sampled_from(PARTS), max_size=2))
        turns = []
        for index in range(draw(st.integers(1, 3))):
            parts = [*parts, (f"{number}/{index}", draw(st.integers(1, 150)))]
            n_output = draw(st.integers(1, 12))
            lane = draw(st.sampled_from([Lane.DEFAULT, Lane.BATCH, Lane.INTERACTIVE]))
            turns.append(Turn(tuple(parts), n_output, draw(st.sampled_from([0.0, 0.01])), f"{number}", lane))
            parts = [*parts, (parts[-1][0] + ANSWER, n_output)]
        sessions.append(Session(draw(st.sampled_from([0.0, 0.001, 0.05, 0.3])), tuple(turns)))
    return as_sent(sessions)


def run_both(sessions: list[Session], slots: int, n_cells: int, target_itl_s: float, *, is_split: bool) -> None:
    fake = TimedFake(slots=slots, n_cells=n_cells, is_split=is_split, clock=VirtualClock())
    same = layout(
        slots=slots,
        n_cells=fake.n_cells,
        n_batch=N_BATCH,
        n_spare_seqs=4,
        is_split=fake.is_split,
        mixes_rows=fake.mixes_rows,
        state_token_bytes=TOKEN_BYTES,
    )
    simulated = Recorded(same, COSTS, VirtualClock(), 1)
    simulated.plans = []
    setup = Setup(same, COSTS, target_itl_s, 1 << 22, 64)
    outcomes = []
    for backend in (fake, simulated):
        assert isinstance(backend, TimedFake | Recorded)
        outcomes.append(Replica(setup, backend, backend.clock, sessions, 1.0).run())
    assert simulated.plans == fake.plans
    of_fake, of_simulated = ([record.n_cached for record in outcome.records] for outcome in outcomes)
    assert of_simulated == of_fake
    assert outcomes[0].seconds == pytest.approx(outcomes[1].seconds)


@given(some_sessions(), st.integers(2, 8), st.sampled_from([0.0, 0.01, 0.14]))
@settings(max_examples=60, deadline=None)
def test_split_streams(sessions: list[Session], slots: int, target_itl_s: float) -> None:
    run_both(sessions, slots, 768 * slots, target_itl_s, is_split=True)


@given(some_sessions(), st.integers(1, 8), st.sampled_from([0.0, 0.01, 0.14]))
@settings(max_examples=60, deadline=None)
def test_one_pool(sessions: list[Session], slots: int, target_itl_s: float) -> None:
    run_both(sessions, slots, 2048, target_itl_s, is_split=False)


@given(some_sessions(), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_requests_outgrow_their_streams(sessions: list[Session], slots: int) -> None:
    run_both(sessions, slots, 256 * slots, 0.14, is_split=True)
