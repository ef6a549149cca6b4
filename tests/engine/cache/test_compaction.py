"""Compaction under an engine at work: with holes that are worth moving for after a few cells, instead of a thousand."""

from __future__ import annotations

from random import Random

import pytest

from localrun.engine.cache import cells as cells_module
from localrun.engine.cache.cells import PoolCells
from tests.engine.harness import Harness, expected_output
from tests.fakes.backend import FakeBackend


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_requests_that_come_and_go_are_moved_and_answer_as_if_alone(is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch):
    """The harness compares all books, cell by cell, after every step."""
    monkeypatch.setattr(cells_module, "COMPACT_RATIO", 1.0)
    monkeypatch.setattr(cells_module, "COMPACT_CELLS", 8)
    monkeypatch.setattr(cells_module, "MOVE_TOKENS", 6)
    n_moved = {1: 0, 2: 0}
    move = PoolCells.move

    def counted(cells: PoolCells, seqs: list[int], start: int, end: int) -> None:
        n_moved[min(2, len(seqs))] += 1
        n_used, span = cells.n_used, cells.span
        move(cells, seqs, start, end)
        assert (cells.n_used, cells.span < span) == (n_used, True)

    monkeypatch.setattr(PoolCells, "move", counted)

    def as_placed(fake: FakeBackend) -> FakeBackend:
        fake.n_gpu_layers = 99 if is_on_gpu else 0
        return fake

    for seed in range(4):
        _run_trace(Random(seed), Harness(n_cells=600, n_slots=4, n_seqs=9, wrap=as_placed))
    assert n_moved[1] > 20
    assert n_moved[2] > 2, "nothing that is shared was moved"


def _run_trace(random: Random, harness: Harness) -> None:
    beginnings = [[letter] * 40 for letter in b"xyz"]
    asked: dict[int, tuple[list[int], int]] = {}
    for request_id in range(30):
        own = [random.randrange(97, 123) for _ in range(random.randint(1, 50))]
        prompt, n_predict = random.choice(beginnings) + own, random.randint(1, 40)
        asked[request_id] = prompt, n_predict
        harness.submit(request_id, prompt, n_predict=n_predict)
        for _ in range(random.randint(0, 12)):
            harness.step()
    harness.run()
    for request_id, (prompt, n_predict) in asked.items():
        assert harness.tokens[request_id] == expected_output(prompt, n_predict)
