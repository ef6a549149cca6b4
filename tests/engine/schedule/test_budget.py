"""The step-cost model on machines that are made up: a base, a cost per row, and one per row and depth."""

from __future__ import annotations

from random import Random

import pytest

from localrun.engine.schedule.budget import SMALL_ROWS, TILE_ROWS, Budget, CostModel, best_size, deep_size, tile_waste


class Machine:
    """Prompt rows take base + rows * (row + depth/1024 * deep) seconds, streams `decode_s`, give or take, and a budget
    watches. `tile` multiplies the time of a size, as kernels do that do not fill their tiles."""

    def __init__(
        self,
        *,
        base_s: float = 0.01,
        row_s: float = 0.0005,
        deep_s: float = 0.0,
        decode_s: float = 0.01,
        batch_rows: int = 512,
        noise: float = 0.05,
        tile: dict[int, float] | None = None,
    ) -> None:
        self.budget = Budget(batch_rows=batch_rows, mixes_rows=False)
        self.base_s, self.row_s, self.deep_s, self.decode_s, self.noise = base_s, row_s, deep_s, decode_s, noise
        self.tile = tile or {}
        self.random = Random(1)

    def prompt_s(self, n_rows: int, depth: float) -> float:
        seconds = self.base_s + n_rows * (self.row_s + self.deep_s * (depth + n_rows / 2) / 1024)
        return seconds * self.tile.get(n_rows, 1.0)

    def step(self, n_decode: int, n_prefill: int, *, depth: float = 512) -> float:
        seconds = (self.decode_s if n_decode else 0.0) + (self.prompt_s(n_prefill, depth) if n_prefill else 0.0)
        seconds *= self.random.uniform(1 - self.noise, 1 + self.noise)
        self.budget.observe(n_decode=n_decode, n_prefill=n_prefill, depth=depth, step_s=seconds)
        return seconds

    def learn(self, n_steps: int = 300) -> Machine:
        """All kinds of steps, a large one last."""
        for _ in range(n_steps):
            self.step(4, 0)
            n_prefill = self.random.choice([16, 64, 128, 192, 256])
            depth = self.random.choice([0, 1024, 4096])
            self.step(self.random.choice([0, 4]), n_prefill, depth=depth)
        self.step(0, 512)
        return self

    def rows(self, *, n_decode: int = 4, depth: float = 512, target_s: float = 0.1) -> int:
        return self.budget.prefill_rows(n_decode=n_decode, depth=depth, target_s=target_s)


def test_without_streams_or_without_a_target_the_whole_batch_is_for_prompts():
    machine = Machine(base_s=1, row_s=1).learn()
    assert machine.rows(n_decode=8, target_s=0.0) == 512


def test_without_streams_the_smallest_batch_that_is_nearly_as_fast_is_taken():
    assert Machine(base_s=0.0).learn().rows(n_decode=0) <= 32, "all sizes are as fast"
    assert Machine(base_s=0.1).learn().rows(n_decode=0) >= 384, "0.1 s per batch: 512 rows are the fastest"


def test_streams_take_their_rows_where_both_are_computed_together():
    assert Budget(batch_rows=512, mixes_rows=True).prefill_rows(n_decode=8, depth=0, target_s=0.0) == 504


def test_a_step_with_prompt_rows_stays_within_the_target():
    machine = Machine().learn()
    assert machine.rows() == 2 * TILE_ROWS, "(100 - 10 - 10) / 0.5 = 160 rows, in whole tiles"
    assert machine.decode_s + machine.prompt_s(machine.rows(), 512) <= 0.1


def test_a_deeper_prompt_leaves_room_for_fewer_rows():
    machine = Machine(base_s=0.005, row_s=0.0002, deep_s=0.0002).learn()
    rows = [machine.rows(depth=depth) for depth in (0, 1024, 4096)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[-1]


def test_a_size_that_the_kernels_dislike_is_learned_and_avoided():
    plain, picky = Machine().learn(), Machine(tile={128: 1.9}).learn()
    assert plain.rows() == 128
    assert picky.rows() == TILE_ROWS, "128 rows take as long as 243 would, which is beyond the target"


def test_prompts_always_progress_and_a_step_may_take_twice_what_the_streams_take():
    slow = Machine(row_s=0.1, decode_s=0.3).learn()
    assert slow.rows(target_s=0.05) == SMALL_ROWS[0]
    heavy = Machine(row_s=0.001, decode_s=0.3).learn()
    assert heavy.rows(target_s=0.05) >= 4 * TILE_ROWS, "the target is out of reach anyway: 0.29 / 0.001 rows"


def test_before_anything_is_known_a_tile_is_tried():
    assert Budget(batch_rows=512, mixes_rows=False).prefill_rows(n_decode=2, depth=0, target_s=0.1) == TILE_ROWS
    assert Budget(batch_rows=32, mixes_rows=False).prefill_rows(n_decode=2, depth=0, target_s=0.1) == 32


def test_rows_at_most_double_from_one_step_to_the_next():
    machine = Machine(row_s=0.00001, noise=0.0).learn()
    assert machine.rows() == 512
    machine.step(4, 64)
    assert machine.rows() == 128


def test_an_hour_of_streams_alone_does_not_make_prompt_rows_look_free():
    machine = Machine(row_s=0.001).learn()
    before = machine.rows()
    for _ in range(20_000):
        machine.step(4, 0)
    assert machine.rows() == before


def test_a_machine_that_slows_down_gets_fewer_rows_soon():
    machine = Machine().learn()
    before = machine.rows()
    machine.base_s, machine.row_s = 0.02, 0.002
    for _ in range(40):
        machine.step(4, machine.rows(), depth=512)
    assert machine.rows() < before
    assert machine.prompt_s(machine.rows(), 512) <= 0.1


@pytest.mark.parametrize("start", [0, 4096])
def test_what_recomputing_costs_grows_with_length_and_depth(start: int):
    budget = Machine(deep_s=0.0003).learn().budget
    assert budget.recompute_s(start, 256) < budget.recompute_s(start, 512)
    assert budget.recompute_s(0, 256) <= budget.recompute_s(start, 256)


def test_on_a_slow_machine_no_prompt_is_computed_where_streams_cannot_interrupt_it():
    assert Budget(batch_rows=512, mixes_rows=False).direct_tokens(0.14) == TILE_ROWS, "nothing is known yet"
    assert Machine().learn().budget.direct_tokens(0.14) == TILE_ROWS
    assert Machine(base_s=0.0, row_s=0.005).learn().budget.direct_tokens(0.14) == SMALL_ROWS[0]
    assert Machine(row_s=0.05).learn().budget.direct_tokens(0.14) == 1


def deep_machine() -> Machine:
    """4,096 tokens deep a row takes 20 ms, at the beginning it takes none to speak of."""
    return Machine(base_s=0.01, row_s=0.0002, deep_s=0.005, noise=0.01).learn()


def test_deep_in_a_prompt_there_is_time_for_a_few_rows_where_a_small_batch_would_take_too_long():
    machine = deep_machine()
    rows = machine.budget.rows_until(depth=4096, left_s=0.1)
    assert 1 <= rows < SMALL_ROWS[0]
    assert machine.prompt_s(rows, 4096) <= 0.1
    assert machine.budget.rows_until(depth=4096, left_s=0.02) == 0
    assert machine.budget.least_rows(4096) in (1, 2)
    assert machine.budget.least_rows(0) == SMALL_ROWS[0], "rows are nothing beside the weights"


def test_a_depth_that_was_never_seen_is_tried_with_a_few_rows():
    machine = Machine(base_s=0.01, row_s=0.0002, deep_s=0.005)
    for _ in range(20):
        machine.step(0, 64, depth=0)
    rows = [machine.budget.rows_until(depth=depth, left_s=10.0) for depth in (0, 4096, 30_000)]
    assert rows == sorted(rows, reverse=True)
    assert rows[1] < SMALL_ROWS[0]
    assert rows[2] <= 2
    assert machine.budget.direct_tokens(10.0, 4096) == rows[1]


def test_the_end_of_a_deep_prompt_is_not_computed_whole_before_the_streams():
    budget = deep_machine().budget
    assert budget.is_better_whole(40, part_rows=16, depth=0, left_s=0.0)
    assert not budget.is_better_whole(40, part_rows=4, depth=4096, left_s=0.1)
    assert budget.is_better_whole(40, part_rows=4, depth=4096, left_s=1.0)


def test_a_few_tokens_at_the_end_of_a_long_prompt_go_to_the_background():
    budget = deep_machine().budget
    assert budget.direct_tokens(0.14, 0) == TILE_ROWS
    assert budget.direct_tokens(0.14, 4096) < SMALL_ROWS[0]


def test_what_a_change_of_adapters_costs_is_learned_and_never_more_than_a_whole_step():
    budget = Budget(batch_rows=512, mixes_rows=False)
    assert budget.switch_s == 0.0
    for index in range(40):
        n_rows, switches = (64, 128, 192)[index % 3], index % 2 == 0
        budget.observe(
            n_decode=0, n_prefill=n_rows, depth=0.0, step_s=n_rows * 1e-3 + 0.02 * switches, switches=switches
        )
    assert budget.switch_s == pytest.approx(0.02, rel=0.1)
    budget.observe(n_decode=2, n_prefill=0, depth=0.0, step_s=0.015, switches=True)
    assert budget.switch_s == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("n_rows", "n_heads", "n_threads", "waste"),
    [
        (512, 9, 2, 1.0),  # chunks of 576 rows: 9 tiles
        (256, 9, 2, 40 / 36),  # chunks of 288 rows: 5 tiles instead of 4.5
        (256, 8, 6, 55 / 32),
        (384, 8, 6, 1.0),  # chunks of 128 rows
        (256, 32, 8, 1.0),
        (448, 12, 1, 1.0),  # one thread has one chunk
        (16, 9, 2, 1.0),
    ],
)
def test_tiles_that_are_not_full_are_computed_whole(n_rows: int, n_heads: int, n_threads: int, waste: float):
    assert tile_waste(n_rows, n_heads, n_threads) == pytest.approx(waste)


def test_a_batch_deep_in_a_prompt_has_the_rows_that_fill_their_tiles():
    model = CostModel(lambda n_rows: tile_waste(n_rows, 8, 6))
    for n_rows in (64, 192, 256, 384, 512) * 4:
        for depth in (0, 4096):
            attention_s = 4e-6 * n_rows * tile_waste(n_rows, 8, 6) * (depth + n_rows / 2) / 64
            model.observe(n_rows, depth, 0.01 + 1e-4 * n_rows + attention_s)
    assert best_size(model, 512, 4096, allowed_s=10.0) == 384
    assert deep_size(model, 512, is_alone=True) == 384
    assert deep_size(model, 512, is_alone=False) == 192
    assert deep_size(CostModel(), 512, is_alone=True) == deep_size(CostModel(), 512, is_alone=False) == 256
