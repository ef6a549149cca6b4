"""What admitting costs while many wait, counted in looks at prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from localrun.engine.cache.tree import PrefixKey, common_prefix
from localrun.engine.schedule.scheduler import SHARED_PREFIX_TOKENS
from tests.engine.harness import Harness, expected_output

SHARED = [97 + at % 20 for at in range(400)]
N_FOLLOWERS = 20


def count_looks(run: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the length of the prompt whenever admission matches one with the cache."""
    looks: list[int] = []
    match = run.engine.cache.match

    def counted(key: PrefixKey) -> int:
        looks.append(len(key.tokens))
        return match(key)

    monkeypatch.setattr(run.engine.cache, "match", counted)
    return looks


@pytest.mark.parametrize("is_split", [False, True], ids=["one pool", "split"])
def test_followers_are_looked_at_when_something_changes_and_not_in_every_step(
    is_split: bool, monkeypatch: pytest.MonkeyPatch
):
    run = Harness(n_cells=8192, n_slots=8, n_batch=16, n_seqs=32, is_split=is_split, ram_cache_bytes=1 << 22)
    run.submit(0, [*SHARED, 1], n_predict=2)
    run.step()
    looks = count_looks(run, monkeypatch)
    for request_id in range(1, N_FOLLOWERS + 1):
        run.submit(request_id, [*SHARED, 2, request_id], n_predict=2)
    n_steps = 0
    while run.engine.scheduler.running[0].n_computed < len(SHARED) - 2 * SHARED_PREFIX_TOKENS:
        run.step()
        n_steps += 1
    assert n_steps >= 10
    assert len(run.engine.scheduler.waiting) == N_FOLLOWERS
    assert len(looks) == N_FOLLOWERS
    run.run()
    for request_id in range(1, N_FOLLOWERS + 1):
        assert run.tokens[request_id] == expected_output([*SHARED, 2, request_id], 2)
    assert run.engine.totals.cached_tokens >= N_FOLLOWERS * (len(SHARED) - 16), "all of them copied"


def test_who_waits_for_the_background_is_looked_at_again_when_its_batch_is_over(monkeypatch: pytest.MonkeyPatch):
    run = Harness(n_cells=4096, n_slots=8, n_batch=64, is_split=True, n_background_seqs=2, background_looks=40)
    run.submit(0, SHARED, n_predict=2)
    run.step()
    looks = count_looks(run, monkeypatch)
    for request_id in range(1, 5):
        run.submit(request_id, [65 + request_id] * 300, n_predict=2)
    for _ in range(8):
        run.step()
    assert run.backend.worker.is_busy
    assert len(looks) == 4
    run.run()
    for request_id in range(1, 5):
        assert run.tokens[request_id] == expected_output([65 + request_id] * 300, 2)


def test_followers_of_a_leader_that_is_cancelled_start_at_once():
    run = Harness(n_cells=4096, n_slots=8, n_batch=16)
    run.submit(0, [*SHARED, 1], n_predict=2)
    run.step()
    run.submit(1, [*SHARED, 2], n_predict=2)
    run.step()
    assert [request.id for request in run.engine.scheduler.waiting] == [1]
    run.engine.cancel(0)
    run.step()
    assert [request.id for request in run.engine.scheduler.running] == [1]
    run.run()
    assert run.tokens[1] == expected_output([*SHARED, 2], 2)


class Counted(list[int]):
    """Counts the tokens that are looked at."""

    n_read = 0

    def __getitem__(self, at: object) -> object:  # type: ignore[override]
        found = super().__getitem__(at)  # type: ignore[index]
        self.n_read += len(found) if isinstance(found, Sequence) else 1
        return found


@pytest.mark.parametrize("n_shared", [0, 1, 100, 1000, 5000])
def test_a_common_beginning_is_found_in_time_by_its_length_and_not_by_that_of_the_prompts(n_shared: int):
    one, other = Counted([7] * 100_000), Counted([7] * n_shared + [8] * 100_000)
    assert common_prefix(one, other, 0, 100_000) == n_shared
    assert one.n_read == other.n_read <= 4 * n_shared + 256
