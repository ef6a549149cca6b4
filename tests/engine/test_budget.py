from __future__ import annotations

from random import Random

import pytest

from localrun.engine.budget import FLOOR_ROWS, TILE_ROWS, Budget


class Machine:
    """Steps that take base + row * rows + span * rows * span/1024 seconds, give or take, and a budget that watches."""

    def __init__(
        self,
        *,
        target_itl_s: float = 0.1,
        base_s: float = 0.01,
        row_s: float = 0.0005,
        span_s: float = 0.0,
        batch_rows: int = 512,
        noise: float = 0.05,
    ) -> None:
        self.budget = Budget(target_itl_s=target_itl_s, batch_rows=batch_rows)
        self.base_s, self.row_s, self.span_s, self.noise = base_s, row_s, span_s, noise
        self.random = Random(1)

    def step_s(self, n_rows: int, span: int) -> float:
        return self.base_s + n_rows * (self.row_s + self.span_s * span / 1024)

    def step(self, n_decode: int, n_prefill: int, *, span: int = 1024) -> None:
        step_s = self.step_s(n_decode + n_prefill, span) * self.random.uniform(1 - self.noise, 1 + self.noise)
        self.budget.observe(n_decode=n_decode, n_prefill=n_prefill, span=span, step_s=step_s)

    def learn(self, n_steps: int = 200) -> Machine:
        """All kinds of steps, a large one last."""
        for _ in range(n_steps):
            n_prefill = self.random.choice([0, 0, 36, 64, 192])
            self.step(self.random.choice([1, 4, 8]), n_prefill, span=self.random.choice([256, 1024, 4096]))
        self.step(4, 500)
        return self

    def rows(self, *, n_decode: int = 4, span: int = 1024) -> int:
        return self.budget.prefill_rows(n_decode=n_decode, span=span)


def test_without_streams_or_without_a_target_the_whole_batch_is_for_prompts():
    assert Machine(base_s=1, row_s=1).learn().rows(n_decode=0) == 512
    assert Machine(base_s=1, row_s=1, target_itl_s=0.0).learn().rows(n_decode=8) == 504


def test_a_step_with_prompt_rows_stays_within_the_target():
    machine = Machine().learn()
    assert machine.rows() == 2 * TILE_ROWS, "(100 - 12) / 0.5 = 176 rows, in whole tiles"
    assert machine.step_s(machine.rows() + 4, 1024) <= 0.1


def test_a_longer_span_leaves_room_for_fewer_rows():
    machine = Machine(base_s=0.005, row_s=0.0002, span_s=0.0002).learn()
    rows = [machine.rows(span=span) for span in (256, 1024, 4096)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[2]


def test_prompts_progress_on_a_machine_that_misses_the_target_anyway():
    slow = Machine(target_itl_s=0.05, base_s=0.2, row_s=0.01).learn()
    assert slow.rows() == FLOOR_ROWS, "twice the 240 ms of a step without: 24 rows"
    slower = Machine(target_itl_s=0.05, row_s=1.0).learn()
    assert slower.rows(n_decode=1) == FLOOR_ROWS


def test_a_batch_full_of_streams_has_no_row_left():
    machine = Machine(base_s=0.001, row_s=0.0001, batch_rows=32).learn()
    assert machine.rows(n_decode=30) == 2
    assert machine.rows(n_decode=32) == 0


def test_before_it_knows_the_machine_it_grants_one_tile():
    assert Machine().rows() == TILE_ROWS
    assert Machine(batch_rows=32).rows() == 28


def test_predictions_follow_the_machine_and_its_changes():
    machine = Machine(span_s=0.0001).learn()
    assert machine.budget.predict_s(100, 1024) == pytest.approx(0.07, rel=0.1)
    machine.base_s, machine.row_s, machine.span_s = 0.02, 0.001, 0.0
    machine.learn(600)
    assert machine.budget.predict_s(100, 1024) == pytest.approx(0.12, rel=0.1)


def test_prompt_rows_at_most_double_from_step_to_step():
    machine = Machine(row_s=0.00001).learn()
    machine.step(4, 0)
    granted = []
    for _ in range(5):
        granted.append(machine.rows())
        machine.step(4, granted[-1])
    assert granted == [64, 128, 256, 508, 508]


@pytest.mark.parametrize("n_alone", [300, 3000, 30_000])
def test_a_prompt_after_a_long_time_of_streams_alone_holds_them_up_no_longer_than_allowed(n_alone: int):
    """Steps of one kind, noisy and now and then ten times as long, must not wear away what prompt rows cost."""
    machine = Machine(span_s=0.0001, noise=0.3).learn()
    for round_number in range(4):
        for at in range(n_alone):
            machine.step(4, 0, span=1000 + at % 300)
            if at % 100 == 50:
                machine.budget.observe(n_decode=4, n_prefill=0, span=1000, step_s=0.12)
        for _ in range(20):
            rows = machine.rows(span=1300)
            assert rows >= FLOOR_ROWS
            assert machine.step_s(rows + 4, 1300) < 0.125, f"{rows} rows in round {round_number}"
            machine.step(4, rows, span=1300)


def test_a_prediction_is_never_negative():
    machine = Machine(base_s=0.0)
    for n_prefill in (0, 190) * 20:
        machine.step(8, n_prefill)
    assert machine.budget.predict_s(0, 0) >= 0.0
