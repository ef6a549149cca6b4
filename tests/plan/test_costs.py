from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.schedule.budget import tile_waste
from localrun.errors import LocalrunError
from localrun.plan.backend import SimBackend
from localrun.plan.calibration import Speed, daemon_costs
from localrun.plan.costs import PromptCosts, Sample, StreamCosts, VirtualClock, WaitCosts, least_squares
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


# A 135M model (Q4_0) on two virtual processors: rows of one prompt, how deep they began, and milliseconds.
MEASURED = {
    (2, 0): 10.2, (8, 0): 17.5, (16, 0): 25.2, (32, 0): 48.8, (48, 0): 75.1, (64, 0): 86.1, (512, 0): 708.8,
    (2, 64): 11.8, (8, 64): 23.5, (16, 64): 38.3, (32, 64): 74.2, (48, 64): 114.2, (64, 64): 90.4, (256, 64): 345.8,
    (8, 512): 69.0, (16, 512): 130.1, (32, 512): 256.0, (64, 512): 133.6, (256, 512): 459.3, (512, 512): 932.4,
}  # fmt: skip


def test_fewer_rows_than_a_tile_are_dear_behind_much_context() -> None:
    """Their attention is computed one by one: 32 rows behind 512 tokens took twice as long as 64. One line for all was
    off by half."""
    samples = [Sample(n_rows, depth, ms / 1000) for (n_rows, depth), ms in MEASURED.items()]
    found = PromptCosts.fitted(samples, n_heads=9, n_threads=2)
    for n_rows, depth, seconds in samples:
        assert found.batch_s(n_rows, depth) == pytest.approx(seconds, rel=0.06)
    # What was not among them: 20 rows behind 1,000 tokens took 288 to 292 ms, and 399 at the beginning 548 to 554.
    assert found.batch_s(20, 1000) == pytest.approx(0.290, rel=0.1)
    assert found.batch_s(399, 0) == pytest.approx(0.551, rel=0.1)
    assert found.scaled(2.0).batch_s(20, 1000) == pytest.approx(2 * found.batch_s(20, 1000))


def test_rows_of_a_simulated_prompt_are_tiles_or_not() -> None:
    few = PromptCosts(0.0, 1e-3, 1e-5)
    prompts = PromptCosts(0.0, 1e-3, 1e-6, few=few, n_heads=9, n_threads=2)
    of = costs(beside=prompts, background=prompts)

    def seconds(n_rows: int) -> float:
        backend = SimBackend(layout(), of, VirtualClock(), 1)
        for begin, end in ((0, 512), (512, 512 + n_rows)):
            backend.batch.pos[: end - begin], backend.batch.seq[: end - begin] = range(begin, end), 0
            before_s = backend.clock()
            backend.decode(end - begin)
        return backend.clock() - before_s

    assert seconds(63) == pytest.approx(0.063 + 63 * 1e-5 * (512 + 31.5))
    assert seconds(64) == pytest.approx(0.064 + 64 * 1e-6 * tile_waste(64, 9, 2) * (512 + 32))


WAITS = WaitCosts((0.1, 0.3), ((0.002, 0.006, 0.010), (0.003, 0.013, 0.043)))


@pytest.mark.parametrize(
    ("batch_s", "share", "extra_s"),
    [
        (0.1, 0.0, 0.002),
        (0.3, 0.5, 0.013),
        (0.2, 0.75, (0.008 + 0.028) / 2),
        (0.5, 1.0, 0.010 + 2 * 0.033),
        (0.01, 1.0, 0.010),  # no operation of a shorter batch is shorter
    ],
)
def test_waits_are_those_of_the_batches_that_were_measured(batch_s: float, share: float, extra_s: float) -> None:
    assert WAITS.extra_s(batch_s, share) == pytest.approx(extra_s)
    assert WAITS.scaled(2.0).extra_s(2 * batch_s, share) == pytest.approx(2 * extra_s)


@pytest.mark.parametrize("n_rows", [300, 100])
def test_a_step_waits_for_a_piece_of_the_batch_which_goes_on_meanwhile(n_rows: int) -> None:
    """What the step itself takes longer is not the batch's time, and all that it waits is."""
    of = costs(background=PromptCosts(0.0, 1e-3, 0.0), streams=StreamCosts((1,), (0.010,), (0.0,)), waits=WAITS)
    cold_s, longest_s = WAITS.extra_s(n_rows * 1e-3, 0.0), WAITS.extra_s(n_rows * 1e-3, 1.0)
    backend = SimBackend(layout(), of, VirtualClock(), 1)
    worker, waits = backend.worker, []
    assert worker is not None
    worker.batch.pos[:n_rows], worker.batch.seq[:n_rows] = range(n_rows), 0
    worker.start(n_rows)
    for pos in range(10_000):
        if worker.is_over():
            break
        before_s = backend.clock()
        backend.batch.pos[0], backend.batch.seq[0] = pos, 0
        backend.decode(1)
        waits.append(backend.clock() - before_s - 0.010)
    assert 0.7 * longest_s < max(waits) <= longest_s + 1e-9
    assert min(waits[:-1]) >= cold_s
    assert backend.clock() == pytest.approx(n_rows * 1e-3 + (0.010 + cold_s) * len(waits))


def test_drafts_are_verified_while_the_background_waits() -> None:
    """A batch of the background goes on when the step is over, and not while drafts are computed."""
    of = costs(
        background=PromptCosts(0.0, 1e-3, 0.0), streams=StreamCosts((1, 2), (0.010, 0.020), (0.0, 0.0)),
        waits=WaitCosts((0.1,), ((0.002, 0.002),)),
    )  # fmt: skip
    backend = SimBackend(layout(), of, VirtualClock(), 1)
    worker = backend.worker
    assert worker is not None
    worker.batch.pos[:100], worker.batch.seq[:100] = range(100), 0
    worker.start(100)
    backend.batch.pos[:2], backend.batch.seq[:2], backend.batch.wants_logits[:2] = (0, 1), 0, 1
    backend.decode(2)
    assert backend.clock() == pytest.approx(0.022)
    assert worker.ends_at_s == pytest.approx(0.122)


def test_between_and_beyond_what_was_measured_lines_go_on() -> None:
    streams = StreamCosts((1, 4, 8), (0.003, 0.006, 0.010), (1e-6, 1e-6, 1e-6))
    assert streams.step_s(2, 0) == pytest.approx(0.004)
    assert streams.step_s(6, 0) == pytest.approx(0.008)
    assert streams.step_s(16, 0) == pytest.approx(0.018)


def test_a_step_is_where_it_was_measured() -> None:
    """One stream of a 135M model behind 67, 515, 1,027 and 2,051 tokens: no line, and chats are where it is too low."""
    own = [Sample(1, *each) for each in ((67, 0.0090), (515, 0.0185), (1027, 0.0252), (2051, 0.0397))]
    eight = [Sample(8, 8 * each.tokens, 3 * each.seconds) for each in own]
    found = StreamCosts.fitted([*eight, *reversed(own)])
    assert found.step_s(1, 515) == 0.0185
    assert found.step_s(1, 291) == pytest.approx((0.0090 + 0.0185) / 2)
    assert found.step_s(1, 20) == pytest.approx(0.0090 - 47 * (0.0185 - 0.0090) / 448)
    assert found.step_s(1, 3051) == pytest.approx(0.0397 + 1000 * found.per_token_s[0])
    assert found.step_s(8, 8 * 1027) == pytest.approx(3 * 0.0252)
    assert found.step_s(2, 2 * 515) == pytest.approx(0.0185 * (1 + 2 / 7))  # a seventh of the way from 1 to 8
    assert found.scaled(2.0).step_s(2, 1030) == pytest.approx(2 * found.step_s(2, 1030))


def test_a_machine_is_as_quick_as_the_steps_that_were_measured_again() -> None:
    """0.5B, in Q4_0: in a few seconds one and two streams are measured, and a line through these would have eight take
    twice as long as they do."""
    seconds = {1: 0.0113, 2: 0.0227, 3: 0.0306, 4: 0.0295, 5: 0.0430, 6: 0.0502, 7: 0.0602, 8: 0.0393}
    known, again = (
        costs(streams=StreamCosts.fitted(Sample(n, 64.0 * n, slower * seconds[n]) for n in measured))
        for slower, measured in ((1.0, seconds), (1.1, (1, 2)))
    )
    assert Speed.between(known, again).decode == pytest.approx(1.1)


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
