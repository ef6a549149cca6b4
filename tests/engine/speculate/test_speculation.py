"""Steps whose drafts a model computes, in simulated time: what is learned of them, and what stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from localrun.engine.request import Request
from localrun.engine.speculate.choice import BY_COST, DraftPolicy
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import DraftSource
from tests.engine.harness import Harness, expected_output
from tests.engine.speculate.drafters import Oracle
from tests.fakes.backend import FakeBackend

STEP_S, ROW_S = 0.05, 0.005
PROMPT = b"tell me a story"
N_TOKENS = 400


class Slow(Oracle):
    """Right, but it takes time; or it has nothing to say."""

    def __init__(self, token_s: float, *, has_drafts: bool = True) -> None:
        super().__init__(3, 1.0)
        self._token_s, self._has_drafts = token_s, has_drafts
        self.advance: Callable[[float], None] = lambda seconds: None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        drafts = super().propose(wanted) if self._has_drafts else [[] for _ in wanted]
        self.advance(self._token_s * max(1, *map(len, drafts)))
        return drafts


def simulated(drafter: Slow | None, policy: DraftPolicy = BY_COST) -> Harness:
    """Whose steps take time by their rows."""

    def speculation(backend: FakeBackend, clock: Callable[[], float]) -> Speculation:
        drafter_of = (lambda request: drafter) if drafter is not None else None
        return Speculation(backend, clock, drafter_of=drafter_of, policy=policy)

    def advance(seconds: float) -> None:
        harness.now_s += seconds

    def timed(fake: FakeBackend) -> FakeBackend:
        decode = fake.decode

        def decode_in(n_rows: int) -> None:
            advance(STEP_S + ROW_S * n_rows)
            decode(n_rows)

        fake.decode = decode_in  # type: ignore[method-assign]
        return fake

    harness = Harness(n_cells=1024, wrap=timed, speculation=speculation)
    if drafter is not None:
        drafter.advance = advance
    return harness


def test_the_time_that_a_drafter_takes_is_no_time_of_the_rows() -> None:
    harness = simulated(Slow(0.01))
    harness.submit(0, list(PROMPT), n_predict=N_TOKENS)
    harness.run()
    counts = {count.source: count for count in harness.finals[0].usage.drafts}
    assert counts[DraftSource.DRAFT_MODEL].n_accepted > 100
    costs = harness.engine._speculation.costs.at(0)
    for n_rows in (size for size in (2, 4, 8) if costs.is_known(size)):
        real = (STEP_S + ROW_S * n_rows) / (STEP_S + ROW_S)
        assert costs.measured(n_rows, 1) == pytest.approx(real, rel=0.1), n_rows


@pytest.mark.parametrize("drafter", [Slow(0.0, has_drafts=False), Slow(100.0)], ids=["has nothing", "too dear"])
def test_what_is_known_for_free_is_drafted_where_a_drafter_does_not_help(drafter: Slow) -> None:
    """One predicted token in six is wrong, so not much is expected of any draft."""
    answer = expected_output(list(PROMPT), N_TOKENS)
    prediction = [token if at % 6 else 97 for at, token in enumerate(answer)]
    n_steps = []
    for given in (None, drafter):
        harness = simulated(given)
        harness.submit(0, list(PROMPT), n_predict=N_TOKENS, prediction=prediction)
        harness.run()
        assert harness.tokens[0] == answer
        n_steps.append(len(harness.steps))
    assert n_steps[0] < 0.9 * N_TOKENS
    assert n_steps[1] < 1.05 * n_steps[0]
