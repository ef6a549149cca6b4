"""A stream's prompt begins when what it needs is there: nobody waits for fresh memory, or for another one's saving."""

from __future__ import annotations

import pytest

from localrun.engine.cache import cache, copies
from localrun.engine.cache.tree import PrefixKey
from tests.engine.harness import Harness, expected_output
from tests.engine.memory_disk import MemoryDisk

LONG = [97 + at % 20 for at in range(150)]
OTHER = [40 + at % 17 for at in range(150)]


@pytest.fixture(autouse=True)
def _nothing_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "QUICK_BYTES", 0)


def split(n_slots: int = 3, **options: object) -> Harness:
    return Harness(n_cells=256 * n_slots, n_slots=n_slots, n_batch=256, is_split=True, **options)  # type: ignore[arg-type]


def start_stream(run: Harness) -> None:
    run.submit(0, [70] * 20, n_predict=200)
    while not run.tokens.get(0):
        run.step()


def take_all_cells(run: Harness) -> None:
    """Other requests come and go, so that what is kept of earlier ones is in memory, and no longer in cells."""
    others = range(90, 93)
    for request_id in others:
        run.submit(request_id, [request_id] * 5, n_predict=4)
    while not run.finals.keys() >= set(others):
        run.step()


def n_running(run: Harness) -> int:
    return len(run.engine.scheduler.running)


def saved_beside_streams(run: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the sequences that are saved at once while somebody runs."""
    at_once = []
    save = copies.Copies.save

    def note(self, seq, key, n_tokens, spare, cut=None):
        if cut is None and run.engine.scheduler.running:
            at_once.append(seq)
        return save(self, seq, key, n_tokens, spare, cut)

    monkeypatch.setattr(copies.Copies, "save", note)
    return at_once


def asked_again_beside_a_stream() -> Harness:
    """Request 0 runs, and request 2 has just asked for more than what 1 left in memory."""
    run = split()
    run.submit(1, LONG, n_predict=2)
    run.run()
    start_stream(run)
    take_all_cells(run)
    run.submit(2, [*LONG, 9], n_predict=4)
    return run


def test_what_is_restored_waits_for_its_memory_and_streams_do_not():
    run = asked_again_beside_a_stream()
    n_tokens = len(run.tokens[0])
    run.step()
    assert (n_running(run), len(run.tokens[0])) == (1, n_tokens + 1)
    run.step()
    assert n_running(run) == 2
    run.run()
    assert run.finals[2].usage.n_cached >= len(LONG)
    assert run.tokens[2] == expected_output([*LONG, 9], 4)
    assert run.tokens[0] == expected_output([70] * 20, 200)


def test_alone_nobody_waits():
    run = split()
    run.submit(1, LONG, n_predict=2)
    run.run()
    take_all_cells(run)
    run.submit(2, [*LONG, 9], n_predict=4)
    run.step()
    assert n_running(run) == 1


def test_whoever_takes_the_place_of_a_long_prompt_waits_until_that_is_saved(monkeypatch: pytest.MonkeyPatch):
    run = split(n_slots=2)
    start_stream(run)
    at_once = saved_beside_streams(run, monkeypatch)
    run.submit(1, LONG, n_predict=2)
    while 1 not in run.finals:
        run.step()
    run.submit(2, OTHER, n_predict=4)
    n_tokens, n_steps = len(run.tokens[0]), 0
    while n_running(run) == 1:
        run.step()
        n_steps += 1
    assert n_steps > 1
    assert len(run.tokens[0]) >= n_tokens + n_steps - 1
    assert not at_once
    assert run.engine.cache.match(PrefixKey([*LONG, 5])) >= len(LONG)
    run.run()
    assert run.tokens[2] == expected_output(OTHER, 4)


def test_later_requests_do_not_overtake_one_that_waits_for_a_copy():
    run = asked_again_beside_a_stream()
    run.submit(3, [50] * 10, n_predict=4)
    while n_running(run) < 2:
        run.step()
    assert [request.id for request in run.engine.scheduler.running][:2] == [0, 2]


def test_whoever_waits_does_not_make_what_leaves_look_used():
    """It is asked about in every step."""
    run = split(n_slots=2, disk=MemoryDisk())
    start_stream(run)
    run.submit(1, LONG, n_predict=2)
    while 1 not in run.finals:
        run.step()
    touched = []
    touch = run.engine.cache.tiers.touch
    run.engine.cache.tiers.touch = lambda blocks: touched.append(1) or touch(blocks)
    key = PrefixKey(OTHER)
    assert not run.engine.cache.is_ready(key)
    assert not touched


@pytest.mark.parametrize("ends_first", [0, 1])
def test_a_gap_is_closed_when_what_is_parked_in_it_is_saved(ends_first: int, monkeypatch: pytest.MonkeyPatch):
    run = split(n_slots=3)
    run.submit(0, LONG, n_predict=20 if ends_first == 0 else 40)
    run.submit(1, OTHER, n_predict=20 if ends_first == 1 else 40)
    run.submit(2, [70] * 30, n_predict=100)
    at_once = saved_beside_streams(run, monkeypatch)
    while 0 not in run.finals or 1 not in run.finals:
        run.step()
    for _ in range(20):
        run.step()
    assert [request.seq for request in run.engine.scheduler.running] == [0]
    assert not at_once
    run.run()
    assert run.tokens[2] == expected_output([70] * 30, 100)


def test_a_stream_is_made_ready_while_the_last_batch_of_its_prompt_is_computed(monkeypatch: pytest.MonkeyPatch):
    run = split(n_background_seqs=1, target_itl_s=0.02)
    start_stream(run)
    warmed = []
    warm = run.backend.warm

    def note(seq: int, n_tokens: int, *, moves: bool = False) -> bool:
        warmed.append((seq, n_tokens, moves))
        return warm(seq, n_tokens, moves=moves)

    monkeypatch.setattr(run.backend, "warm", note)
    run.submit(1, LONG, n_predict=4)
    while not run.tokens.get(1):
        run.step()
    request = next(request for request in run.engine.scheduler.running if request.id == 1)
    assert (request.seq, len(LONG), True) in warmed
