"""Requests whose logits are no numbers, on the fake backend, where one such cell spoils every row that is computed in
the same pool from then on: the others never notice, and nothing of it is kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import MemoryKind
from localrun.wire import Adapter, Finish, Lane
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_output
from tests.engine.memory_disk import MemoryDisk

NAN = 200
FINE = Adapter("/adapters/fine", b"f" * 32)
NOT_FINE = Adapter("/adapters/nan", b"n" * 32)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one pool": {"n_cells": 2048},
    "split": {"n_cells": 2048, "is_split": True},
    "split, background": {"n_cells": 2048, "is_split": True, "n_background_seqs": 2},
    "window": {"n_cells": 2048, "memory_kind": MemoryKind.WINDOW},
    "recurrent": {"n_cells": 2048, "memory_kind": MemoryKind.RECURRENT},
    "hybrid": {"n_cells": 2048, "memory_kind": MemoryKind.HYBRID},
}


def prompt(first: int, n_tokens: int = 100, nan_at: int | None = None) -> list[int]:
    tokens = [10 + (first * 17 + at) % 90 for at in range(n_tokens)]
    if nan_at is not None:
        tokens[nan_at] = NAN
    return tokens


def harness_of(layout: str, **more: Any) -> Harness:
    harness = Harness(**LAYOUTS[layout], **more)
    harness.backend.nan_tokens = {NAN}
    return harness


def check_fine(harness: Harness, request_id: int, tokens: list[int], n_predict: int, adapters: list[Adapter]) -> None:
    assert harness.finals[request_id].finish is Finish.LENGTH, harness.finals[request_id].error_message
    assert harness.tokens[request_id] == expected_output(tokens, n_predict, adapters=adapters)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_others_say_what_they_say_alone_beside_and_after(layout: str):
    harness = harness_of(layout)
    harness.submit(1, prompt(1), n_predict=30)
    harness.step()
    for round_ in (10, 20):
        harness.submit(round_, prompt(2, nan_at=70), adapters=[])
        harness.submit(round_ + 1, prompt(3), adapters=[NOT_FINE])
        harness.submit(round_ + 2, prompt(4), adapters=[])
        harness.submit(round_ + 3, prompt(5), adapters=[FINE])
        harness.run()
        for culprit in (round_, round_ + 1):
            assert harness.finals[culprit].error_code == "no_numbers"
            assert "NaN" in (harness.finals[culprit].error_message or "")
        assert "--kv-type q8_0" in (harness.finals[round_].error_message or "")
        check_fine(harness, round_ + 2, prompt(4), 16, [])
        check_fine(harness, round_ + 3, prompt(5), 16, [FINE])
    check_fine(harness, 1, prompt(1), 30, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_that_is_no_number_is_kept(layout: str):
    disk = MemoryDisk()
    first = harness_of(layout, disk=disk)
    for request_id in (1, 3):
        first.submit(request_id, prompt(2, nan_at=70), adapters=[])
        first.submit(request_id + 1, prompt(3), adapters=[NOT_FINE])
        first.run()
    assert all(final.finish is Finish.ERROR for final in first.finals.values())
    first.engine.close()
    again = harness_of(layout, disk=disk)
    again.backend.nan_tokens = set()
    longer = [*prompt(2, nan_at=70), 50]
    again.submit(1, longer, adapters=[])
    again.submit(2, prompt(3), adapters=[NOT_FINE])
    again.run()
    for request_id, most in ((1, 70), (2, 0)):
        usage = again.finals[request_id].usage
        assert usage is not None
        assert usage.n_cached <= most
    check_fine(again, 1, longer, 16, [])


def test_who_was_doubted_is_computed_with_the_others_again():
    harness = harness_of("one pool")
    harness.submit(1, prompt(1), n_predict=200)
    harness.submit(2, prompt(2), n_predict=200)
    harness.submit(3, prompt(3, nan_at=5))
    while 3 not in harness.finals:
        harness.step()
    while not harness.engine.scheduler.reusable_plan():
        harness.step()
    plan = harness.engine.scheduler.reusable_plan()
    assert plan is not None
    assert len(plan.grants) == 2
    harness.run()
    for request_id in (1, 2):
        check_fine(harness, request_id, prompt(request_id), 200, [])


def test_nobody_is_blamed_for_what_a_batch_left_that_was_given_up_halfway():
    """The background's stream, where a culprit's batch is given up, is then used by one who was doubted before."""
    harness = Harness(n_cells=2048, n_slots=2, is_split=True, n_background_seqs=1, background_looks=4)
    harness.backend.nan_tokens = {NAN}
    harness.submit(1, prompt(1, 20), n_predict=200, lane=Lane.INTERACTIVE)
    harness.step()

    def give_up_halfway(request_id: int) -> None:
        harness.submit(request_id, prompt(request_id, 300, nan_at=5), lane=Lane.INTERACTIVE)
        while not harness.backend.worker.is_busy:
            harness.step()
        harness.step()
        harness.engine.cancel(request_id)

    give_up_halfway(2)
    harness.submit(3, prompt(3, 300), lane=Lane.BATCH)
    while not (doubted := [one for one in harness.engine.scheduler.running if one.isolated_until]):
        harness.step()
    give_up_halfway(4)
    assert doubted[0].n_preempted
    harness.run()
    check_fine(harness, 1, prompt(1, 20), 200, [])
    check_fine(harness, 3, prompt(3, 300), 16, [])


@settings(max_examples=40 * DEPTH)
@given(
    layout=st.sampled_from(list(LAYOUTS)),
    requests=st.lists(
        st.tuples(st.integers(1, 150), st.none() | st.integers(0, 149), st.sampled_from(["", "fine", "nan"])),
        min_size=1, max_size=7,
    ),
    gaps=st.lists(st.integers(0, 9), min_size=7, max_size=7),
    target_s=st.sampled_from([0.0, 0.02]),
    ram=st.sampled_from([0, 1 << 20]),
)  # fmt: skip
def test_whoever_comes_when(
    layout: str, requests: list[tuple[int, int | None, str]], gaps: list[int], target_s: float, ram: int
):
    harness = harness_of(layout, target_itl_s=target_s, ram_cache_bytes=ram)
    asked = []
    for number, ((n_tokens, nan_at, which), gap) in enumerate(zip(requests, gaps, strict=False)):
        tokens = prompt(number % 3, n_tokens, nan_at if nan_at is not None and nan_at < n_tokens else None)
        adapters = {"": [], "fine": [FINE], "nan": [NOT_FINE]}[which]
        asked.append((tokens, adapters))
        harness.submit(number, tokens, adapters=adapters)
        for _ in range(gap):
            harness.step()
    harness.run()
    for number, (tokens, adapters) in enumerate(asked):
        if NAN in tokens or NOT_FINE in adapters:
            assert harness.finals[number].error_code == "no_numbers"
        else:
            check_fine(harness, number, tokens, 16, adapters)
