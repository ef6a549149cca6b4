"""A long prompt is restored in one pool beside streams: a piece in each step, whatever happens meanwhile."""

from __future__ import annotations

from random import Random

import pytest

from localrun.engine.cache import cache, copies, tiers
from localrun.engine.cache.copies import PIECE_TOKENS
from localrun.wire import Finish, Lane
from tests.engine.harness import Harness, expected_output

N_PIECES = 6
LONG = [97 + at * 7 % 23 for at in range(N_PIECES * PIECE_TOKENS + 40)]


def kept(**options: object) -> Harness:
    """The long prompt is in memory, and in no cells; a stream runs."""
    run = Harness(**{"n_cells": 6144, "n_batch": 512, "ram_cache_bytes": 1 << 22, **options})  # type: ignore[arg-type]
    run.submit(1, LONG, n_predict=2)
    run.run()
    assert run.backend.n_used == 0
    run.submit(2, [70] * 20, n_predict=200)
    while not run.tokens.get(2):
        run.step()
    run.engine.cache.tiers.restore.seconds = 1.0  # as if a token took so long: one piece at a time
    return run


def begin(run: Harness, **options: object) -> None:
    run.submit(3, [*LONG, 99], n_predict=4, **options)  # type: ignore[arg-type]
    run.step()
    assert run.engine.cache.restoring
    run.engine.cache.tiers.restore.seconds = 1.0


def test_streams_have_a_token_for_each_piece():
    run = kept()
    begin(run)
    n_tokens, n_steps = len(run.tokens[2]), 0
    while run.engine.cache.restoring:
        run.step()
        run.engine.cache.tiers.restore.seconds = 1.0
        n_steps += 1
    assert n_steps >= N_PIECES - 2
    assert len(run.tokens[2]) == n_tokens + n_steps
    n_rows = run.backend.n_rows_computed
    run.run()
    assert run.tokens[3] == expected_output([*LONG, 99], 4)
    assert run.tokens[2] == expected_output([70] * 20, 200)
    assert run.finals[3].usage.n_cached >= N_PIECES * PIECE_TOKENS
    assert run.backend.n_rows_computed - n_rows < 300, "nothing of it was computed"


def test_alone_it_is_restored_at_once():
    run = kept()
    run.engine.cancel(2)
    run.step()
    run.submit(3, [*LONG, 99], n_predict=4)
    run.step()
    assert not run.engine.cache.restoring
    run.run()
    assert run.tokens[3] == expected_output([*LONG, 99], 4)


@pytest.mark.parametrize("n_steps", [0, 1, 3])
def test_who_is_cancelled_meanwhile_leaves_what_came(n_steps: int):
    run = kept()
    begin(run)
    for _ in range(n_steps):
        run.step()
    run.engine.cancel(3)
    run.check()
    assert not run.engine.cache.restoring
    run.run()
    assert run.finals[3].finish is Finish.CANCELLED
    assert run.tokens[2] == expected_output([70] * 20, 200)


def test_what_is_cleared_meanwhile_is_computed():
    run = kept()
    begin(run)
    run.engine.clear_cache(ram=True, disk=True)
    run.run()
    assert run.tokens[3] == expected_output([*LONG, 99], 4)


def test_who_is_preempted_meanwhile_comes_back():
    run = kept(n_slots=2)
    begin(run, lane=Lane.BATCH)
    run.submit(4, [75] * 10, n_predict=30, lane=Lane.INTERACTIVE)
    run.run()
    assert run.engine.totals.preemptions
    for request_id, prompt, n_output in ((3, [*LONG, 99], 4), (2, [70] * 20, 200), (4, [75] * 10, 30)):
        assert run.tokens[request_id] == expected_output(prompt, n_output)


@pytest.mark.parametrize("seed", [5, 6, 7, 12, 13, 15])
def test_random_arrivals_and_departures_change_no_answer(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Small blocks and small pieces, so that hardly anything is brought back at once; memory and cells are short."""
    for name, value in (("BLOCK_TOKENS", 8), ("PIECE_TOKENS", 16), ("RESTORE_PIECE_S", 1e-9)):
        monkeypatch.setattr(copies, name, value)
    for module in (cache, copies, tiers):
        monkeypatch.setattr(module, "GAIN_TOKENS", 4)
    random, n_brought = Random(seed), 0
    restore_next = cache.Cache.restore_next

    def counted(self: cache.Cache) -> tuple[int, int] | None:
        nonlocal n_brought
        n_brought += bool(self.restoring)
        return restore_next(self)

    monkeypatch.setattr(cache.Cache, "restore_next", counted)
    run = Harness(n_cells=400, n_slots=3, n_batch=48, n_seqs=8, ram_cache_bytes=random.choice([12_000, 1 << 20]))
    bases = [[97 + (at * step) % 19 for at in range(150)] for step in (3, 5, 7)]
    asked: dict[int, list[int]] = {}
    for request_id in range(60):
        base = random.choice(bases)
        asked[request_id] = [*base[: random.randrange(20, 150)], 65 + random.randrange(4)]
        run.submit(request_id, asked[request_id], n_predict=6, lane=random.choice(list(Lane)))
        for _ in range(random.randrange(1, 12) if request_id % 2 else 0):
            run.step()
        if random.random() < 0.2:
            run.engine.cancel(random.randrange(request_id + 1))
            run.check()
        if random.random() < 0.05:
            run.engine.clear_cache(ram=True, disk=False)
        if request_id % 2 and random.random() < 0.5:
            run.run()
    run.run()
    assert n_brought
    for request_id, prompt in asked.items():
        if run.finals[request_id].finish is not Finish.CANCELLED:
            assert run.tokens[request_id] == expected_output(prompt, 6)
