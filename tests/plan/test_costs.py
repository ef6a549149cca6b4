from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import LocalrunError
from localrun.plan.backend import SimBackend
from localrun.plan.calibration import daemon_costs
from localrun.plan.clock import VirtualClock
from localrun.plan.costs import PromptCosts, Sample, StreamCosts, least_squares
from tests.plan.made import costs, layout


def test_a_fit_finds_what_made_the_samples() -> None:
    planted = PromptCosts(0.002, 9e-4, 8e-7)
    samples = [
        Sample(n_rows, depth, planted.batch_s(n_rows, depth)) for n_rows in (64, 128, 512) for depth in (0, 512, 4096)
    ]
    found = PromptCosts.fitted(samples)
    assert (found.fixed_s, found.row_s, found.row_depth_s) == pytest.approx((0.002, 9e-4, 8e-7), rel=1e-3)
    streams = StreamCosts((1, 4), (0.003, 0.007), (4e-6, 5e-6))
    own = [Sample(n, tokens, streams.step_s(n, tokens)) for n in (1, 4) for tokens in (100, 4000)]
    again = StreamCosts.fitted(own)
    assert again.base_s == pytest.approx(streams.base_s)
    assert again.per_token_s == pytest.approx(streams.per_token_s)


@given(st.lists(st.tuples(st.integers(1, 512), st.integers(0, 4096), st.floats(1e-4, 10)), min_size=1, max_size=12))
def test_more_rows_and_deeper_ones_never_take_less(measured: list[tuple[int, int, float]]) -> None:
    found = PromptCosts.fitted([Sample(*each) for each in measured])
    assert min(found.fixed_s, found.row_s, found.row_depth_s) >= 0
    assert found.batch_s(64, 5000) >= found.batch_s(64, 100)


def test_between_and_beyond_what_was_measured_lines_go_on() -> None:
    streams = StreamCosts((1, 4, 8), (0.003, 0.006, 0.010), (1e-6, 1e-6, 1e-6))
    assert streams.step_s(2, 0) == pytest.approx(0.004)
    assert streams.step_s(6, 0) == pytest.approx(0.008)
    assert streams.step_s(16, 0) == pytest.approx(0.018)


def test_a_coefficient_that_would_be_negative_is_left_out() -> None:
    assert least_squares([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0])[1] == 0


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(LocalrunError, match="no step"):
        StreamCosts.fitted([])
    with pytest.raises(LocalrunError, match="no prompt"):
        PromptCosts.fitted([])


def step_s(rows: list[int], *, is_split: bool) -> float:
    """What a step takes that has so many rows of each stream, all of which may be drawn from."""
    of = costs(
        streams=StreamCosts((1, 8), (0.010, 0.017), (0.0, 0.0)),
        drafts=PromptCosts(0.100, 0.001, 0.0),
        alone_drafts=PromptCosts(1.0, 0.001, 0.0),
    )
    backend = SimBackend(layout(is_split=is_split), of, VirtualClock(), 1)
    filled = [(seq, pos) for seq, n in enumerate(rows) for pos in range(n)]
    for row, (seq, pos) in enumerate(filled):
        backend.batch.seq[row], backend.batch.pos[row] = seq, pos
    backend.batch.wants_logits[: len(filled)] = 1
    backend.decode(len(filled))
    return backend.clock()


def test_rows_with_drafts_are_computed_together_where_all_have_as_many():
    assert step_s([3, 3, 3], is_split=True) == pytest.approx(0.100 + 0.009)
    assert step_s([1, 3, 1, 2], is_split=False) == pytest.approx(0.100 + 0.007)
    assert step_s([4], is_split=True) == pytest.approx(1.0 + 0.004)
    # One row of each, then what is left: of the second stream, and of the fourth, which is no neighbour of it.
    assert step_s([1, 3, 1, 2], is_split=True) == pytest.approx(0.013 + 1.002 + 0.010)
    assert step_s([1, 3, 3, 1], is_split=True) == pytest.approx(0.013 + 0.104)


def test_what_a_step_takes_longer_is_told_from_what_its_tokens_do():
    assert daemon_costs({1: 0.3 + 0.2, 8: 0.3 + 8 * 0.2}) == pytest.approx((0.3, 0.2))
    assert daemon_costs({1: 0.5, 8: 0.4}) == (0.5, 0.0)  # an accident
    assert daemon_costs({1: 0.1, 8: 1.6}) == pytest.approx((0.0, 1.5 / 7))
    assert daemon_costs({1: 0.5}) == (0.0, 0.5)
