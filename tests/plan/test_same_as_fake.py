"""The strongest test of the simulated protocol: the same requests, on the fake backend and on the simulated one with
equal costs, give the same plans, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.bench.arrivals import ANSWER, Session, Turn
from localrun.engine.backend import Batch
from localrun.plan.backend import N_TOKENS, SimBackend, SimSampler, SimWorker
from localrun.plan.costs import Account, Costs, PromptCosts, StreamCosts, VirtualClock
from localrun.plan.replica import Outcome, Replica, Setup
from localrun.wire import Lane, Sampling
from tests.depth import DEPTH
from tests.fakes.backend import FakeBackend, FakeWorker
from tests.plan.made import layout

STEP_S, BESIDE_S, ROW_S = 0.002, 0.001, 1e-4
ALONE_S, DRAFTS_S, DRAFT_ROW_S = 0.0021, 0.0022, 1e-5
COSTS = Costs(
    streams=StreamCosts((1,), (STEP_S,), (0.0,)),
    background=PromptCosts(0.0, ROW_S, 0.0),
    beside=PromptCosts(BESIDE_S, ROW_S, 0.0),
    drafts=PromptCosts(DRAFTS_S, DRAFT_ROW_S, 0.0),
    alone_drafts=PromptCosts(ALONE_S, DRAFT_ROW_S, 0.0),
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
        self.says: Iterable[int] = ()
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
        if n_prompt and self.batch.wants_logits[:n_rows].all():  # drafts
            step_s, n_prompt = sum(self._pass_s(*each) for each in self._passes(counts)), 0
        self.clock.spend(step_s, Account.DECODE)
        if n_prompt and self.mixes_rows:
            self.clock.spend(max(0.0, BESIDE_S + ROW_S * n_rows - step_s), Account.PROMPTS)
        elif n_prompt:
            self.clock.spend(BESIDE_S + ROW_S * n_prompt, Account.PROMPTS)
        if self.worker is not None:
            self.worker.seen_s = self.clock.now_s
        super().decode(n_rows)

    def _passes(self, counts: dict[int, int]) -> list[tuple[int, int]]:
        """Streams and rows of each pass."""
        if not self.is_split or self._is_in_pool:
            return [(len(counts), sum(counts.values()))]
        least = min(counts.values())
        more = [seq for seq in counts if counts[seq] > least]
        runs = [[seq for _, seq in run] for _, run in groupby(enumerate(more), lambda at: at[1] - at[0])]
        rest = [(len(run), sum(counts[seq] - least for seq in run)) for run in runs]
        return [(len(counts), least * len(counts)), *rest]

    @staticmethod
    def _pass_s(n_streams: int, n_rows: int) -> float:
        if n_rows == n_streams:
            return STEP_S
        return (ALONE_S if n_streams == 1 else DRAFTS_S) + DRAFT_ROW_S * n_rows

    def sampler(self, sampling: Sampling, *, ignore_eos: bool) -> SimSampler:  # type: ignore[override]
        return SimSampler(self.says)


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
STARTS = (0.0, 0.001, 0.05, 0.3)


class Impatient(Replica):
    """After every `patience`th step the client that has waited longest goes away."""

    patience = 0

    def _step(self, until_s: float) -> None:
        super()._step(until_s)
        if self.patience and self._n_steps % self.patience == 0 and self._running:
            self.engine.cancel(min(self._running))


@st.composite
def some_sessions(draw: st.DrawFn, most_output: int = 12, starts: tuple[float, ...] = STARTS) -> list[Session]:
    sessions = []
    for number in range(draw(st.integers(1, 8))):
        parts = draw(st.lists(st.sampled_from(PARTS), max_size=2))
        repeats = draw(st.sampled_from([0.0, 0.5, 0.95]))
        turns = []
        for index in range(draw(st.integers(1, 3))):
            parts = [*parts, (f"{number}/{index}", draw(st.integers(1, 150)))]
            n_output = draw(st.integers(1, most_output))
            lane = draw(st.sampled_from([Lane.DEFAULT, Lane.BATCH, Lane.INTERACTIVE]))
            think_s = draw(st.sampled_from([0.0, 0.01]))
            turns.append(Turn(tuple(parts), n_output, think_s, f"{number}", lane, None, repeats))
            parts = [*parts, (parts[-1][0] + ANSWER, n_output)]
        sessions.append(Session(draw(st.sampled_from(starts)), tuple(turns)))
    return sessions


def run_both(
    sessions: list[Session], slots: int, n_cells: int, target_itl_s: float, *, is_split: bool, patience: int = 0
) -> Outcome:
    """The fake's outcome, which is the simulation's."""
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
        replica = Impatient(setup, backend, backend.clock, sessions, 1.0)
        replica.patience = patience
        outcomes.append(replica.run())
    assert simulated.plans == fake.plans
    of_fake, of_simulated = (
        [(each.n_cached, each.n_output, each.n_drafted, each.n_accepted, each.problem) for each in outcome.records]
        for outcome in outcomes
    )
    assert of_simulated == of_fake
    assert outcomes[0].seconds == pytest.approx(outcomes[1].seconds)
    return outcomes[0]


@given(some_sessions(), st.integers(2, 8), st.sampled_from([0.0, 0.01, 0.14]))
@settings(max_examples=30 * DEPTH)
def test_split_streams(sessions: list[Session], slots: int, target_itl_s: float) -> None:
    run_both(sessions, slots, 768 * slots, target_itl_s, is_split=True)


@given(some_sessions(), st.integers(1, 8), st.sampled_from([0.0, 0.01, 0.14]))
@settings(max_examples=30 * DEPTH)
def test_one_pool(sessions: list[Session], slots: int, target_itl_s: float) -> None:
    run_both(sessions, slots, 2048, target_itl_s, is_split=False)


@given(some_sessions(), st.integers(2, 4))
@settings(max_examples=20 * DEPTH)
def test_requests_outgrow_their_streams(sessions: list[Session], slots: int) -> None:
    run_both(sessions, slots, 256 * slots, 0.14, is_split=True)


@given(some_sessions(80), st.integers(1, 5), st.booleans())
@settings(max_examples=20 * DEPTH)
def test_drafts(sessions: list[Session], slots: int, is_split: bool) -> None:
    run_both(sessions, slots, 1024 * slots, 0.14, is_split=is_split)


@pytest.mark.parametrize("is_split", [True, False])
def test_answers_that_repeat_their_prompt_are_drafted_and_others_are_not(is_split: bool) -> None:
    def outcome(repeats: float) -> Outcome:
        turns = [Turn(((f"text{each}", 120),), 100, repeats=repeats) for each in range(3)]
        sessions = [Session(0.3 * each, (turn,)) for each, turn in enumerate(turns)]
        return run_both(sessions, 2, 2048, 0.0, is_split=is_split)

    plain, edits = outcome(0.0), outcome(0.95)
    assert all(record.n_drafted == 0 for record in plain.records)
    assert all(record.n_accepted > 30 for record in edits.records)
    assert all(record.n_drafted > record.n_accepted for record in edits.records)  # no draft is always right
    assert edits.n_steps < plain.n_steps


@given(some_sessions(30, (0.0,)), st.integers(1, 4), st.booleans())
@settings(max_examples=20 * DEPTH)
def test_all_come_at_once(sessions: list[Session], slots: int, is_split: bool) -> None:
    run_both(sessions, slots, 768 * slots, 0.14, is_split=is_split)


@given(some_sessions(40), st.integers(1, 4), st.booleans(), st.integers(2, 9))
@settings(max_examples=20 * DEPTH)
def test_clients_that_go_away(sessions: list[Session], slots: int, is_split: bool, patience: int) -> None:
    outcome = run_both(sessions, slots, 768 * slots, 0.14, is_split=is_split, patience=patience)
    assert all(record.n_output or record.problem for record in outcome.records)
