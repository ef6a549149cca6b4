"""Steps with drafts on the fake backend: what is counted, who is told, and how much room a draft may take."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from localrun.engine.backend import MemoryKind, NoRoom
from localrun.engine.sample.constraint import Constraint
from localrun.engine.speculate.choice import DraftChoice
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import Finish, Grammar, GrammarKind, Lane
from tests.engine.disk_harness import flushed, tier
from tests.engine.harness import Harness, expected_output
from tests.engine.speculate.drafters import Oracle, always, any_rows, drafting

PROMPT = list(b"tell me a story")
KINDS = [MemoryKind.ATTENTION, MemoryKind.WINDOW, MemoryKind.HYBRID]


class Wrong(Oracle):
    """Never right."""

    def __init__(self) -> None:
        super().__init__(1, 1.0)

    def _draft(self, request, n_tokens):
        return [(token + 1) % 256 for token in super()._draft(request, n_tokens)]


class Noting(Oracle):
    """Notes who was dropped."""

    def __init__(self) -> None:
        super().__init__(1, 0.5)
        self.dropped: list[int] = []

    def drop(self, request):
        self.dropped.append(request.id)


def with_drafter(oracle: Oracle):
    return lambda backend, clock: Speculation(
        backend, clock, drafter_of=lambda request: oracle, policy=any_rows(1)
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_drafts_count_as_such(kind: MemoryKind):
    harness = Harness(n_cells=512, memory_kind=kind, speculation=with_drafter(Wrong()))
    harness.submit(0, PROMPT, n_predict=50)
    harness.run()
    assert harness.tokens[0] == expected_output(PROMPT, 50)
    (drafted,) = [count for count in harness.finals[0].usage.drafts if count.source == "draft_model"]
    assert drafted.n_drafted > 5
    assert drafted.n_accepted == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_predict", [1, 2, 17])
def test_drafts_fill_no_more_than_the_last_cells(kind: MemoryKind, n_predict: int):
    harness = Harness(n_cells=32, memory_kind=kind, n_slots=1, ram_cache_bytes=0, speculation=drafting(3, 1.0))
    harness.submit(0, PROMPT, n_predict=n_predict)
    harness.run()
    assert harness.tokens[0] == expected_output(PROMPT, n_predict)
    assert harness.finals[0].finish is Finish.LENGTH
    assert harness.engine.totals.preemptions == 0


def test_every_delta_says_how_far_its_request_is():
    harness = Harness(n_cells=512, speculation=drafting(3, 0.6))
    harness.submit(0, PROMPT, n_predict=60)
    while 0 not in harness.finals:
        step = harness.step()
        running = {request.id: request for request in harness.engine.scheduler.running}
        for delta in step.deltas if step is not None else ():
            if delta.id in running and not delta.finish:
                request = running[delta.id]
                assert request.drafts is not None
                counts = request.drafts
                assert (delta.n_computed, delta.n_output) == (request.n_computed, request.n_output)
                assert (delta.n_drafted, delta.n_accepted) == (counts.n_drafted, counts.n_accepted)
    (usage,) = [harness.finals[0].usage]
    assert harness.finals[0].n_drafted == sum(count.n_drafted for count in usage.drafts)
    assert harness.engine.totals.decode_tokens == 60 - 1  # the prompt's step gave the first


@pytest.mark.parametrize(
    ("kind", "is_split", "is_even"),
    [
        (MemoryKind.ATTENTION, False, False),
        (MemoryKind.ATTENTION, True, True),
        (MemoryKind.WINDOW, False, False),
        (MemoryKind.HYBRID, False, True),
    ],
)
@pytest.mark.parametrize(("n_batch", "most_rows"), [(16, 14), (64, 62), (128, 64)])
def test_a_choice_is_told_what_can_be_computed_together(
    kind: MemoryKind, is_split: bool, is_even: bool, n_batch: int, most_rows: int
):
    seen, both = [], []

    def choose(streams, costs, limits) -> DraftChoice | None:
        seen.append(limits)
        if len(streams) == 2:
            both.append(limits)
        return None

    oracle = Oracle(1, 1.0)
    harness = Harness(
        n_cells=512, memory_kind=kind, is_split=is_split, n_batch=n_batch,
        speculation=partial(Speculation, drafter_of=lambda request: oracle, policy=always(choose)),
    )  # fmt: skip
    harness.submit(0, PROMPT, n_predict=5)
    harness.submit(1, PROMPT[::-1], n_predict=5)
    harness.run()
    assert {limits.is_even for limits in seen} == {is_even}
    assert {limits.may_be_uneven for limits in seen} == {is_split}
    assert {limits.most_rows for limits in both} == {most_rows}
    assert {limits.most_each for limits in both} == {min(harness.backend.n_rollback, most_rows)}


def test_drafts_stay_within_a_stream_and_go_on_when_it_is_outgrown():
    harness = Harness(n_cells=128, n_slots=2, is_split=True, n_background_seqs=2, speculation=drafting(3, 1.0))
    n_refused, decode = 0, harness.backend.decode

    def counted(n_rows: int) -> None:
        nonlocal n_refused
        try:
            decode(n_rows)
        except NoRoom:
            n_refused += 1
            raise

    harness.backend.decode = counted
    harness.submit(0, PROMPT * 2, n_predict=70)
    harness.run()
    assert harness.tokens[0] == expected_output(PROMPT * 2, 70)
    assert n_refused == 0


def test_a_drafter_forgets_who_loses_the_slot():
    oracle = Noting()
    harness = Harness(n_cells=256, n_slots=1, speculation=with_drafter(oracle))
    harness.submit(0, PROMPT, n_predict=40, lane=Lane.BATCH)
    for _ in range(4):
        harness.step()
    harness.submit(1, PROMPT[::-1], n_predict=4, lane=Lane.INTERACTIVE)
    harness.run()
    assert harness.engine.totals.preemptions == 1
    assert oracle.dropped == [0, 1, 0]
    assert harness.tokens[0] == expected_output(PROMPT, 40)


@pytest.mark.parametrize("slow_ones", [[False], [True], [False, False, True]])
def test_a_slow_grammar_s_tokens_are_counted_once_each(slow_ones: list[bool]):
    grammar, turns = Grammar(GrammarKind.REGEX, "(abcdef[xyz]){8}"), itertools.cycle(slow_ones)
    with patch.object(Constraint, "is_slow", property(lambda constraint: next(turns))):
        harness = Harness(n_cells=512, speculation=drafting(5, 0.5))
        charged = []
        charge = harness.engine.scheduler.policy.charge

        def noted(client: str, *, n_prefill: int = 0, n_output: int = 0) -> None:
            charged.append(n_output)
            charge(client, n_prefill=n_prefill, n_output=n_output)

        harness.engine.scheduler.policy.charge = noted
        harness.submit(0, PROMPT, n_predict=100, grammar=grammar)
        harness.run()
        harness.engine.close()
    assert len(harness.tokens[0]) == 56
    if not all(slow_ones):
        assert sum(count.n_accepted for count in harness.finals[0].usage.drafts) > 10
    assert sum(charged) == 56
    assert harness.engine.totals.decode_tokens == 55


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_split", [False, True])
def test_what_is_kept_of_an_answer_with_drafts_is_right(kind: MemoryKind, is_split: bool):
    """Turn after turn is restored from what was saved: a wrong draft in it would change what follows."""
    harness = Harness(n_cells=2048, n_slots=2, memory_kind=kind, is_split=is_split, speculation=drafting(7, 0.6))
    prompt, other, n_cached = PROMPT * 4, list(b"something else " * 5), 0
    for turn in range(4):
        harness.submit(2 * turn, prompt, n_predict=70)
        harness.run()
        assert harness.tokens[2 * turn] == expected_output(prompt, 70)
        n_cached = harness.finals[2 * turn].usage.n_cached
        prompt = [*prompt, *harness.tokens[2 * turn], *b" and then? "]
        harness.engine.clear_cache(ram=False, disk=False)
        harness.submit(2 * turn + 1, other[turn:], n_predict=40)
        harness.run()
    assert n_cached > 100


@pytest.mark.parametrize("kind", KINDS)
def test_what_drafts_left_on_disk_is_what_was_said(kind: MemoryKind, tmp_path: Path):
    said: list[list[int]] = []
    for restart in range(3):
        disk = tier(tmp_path)
        harness = Harness(n_cells=512, memory_kind=kind, disk=disk, speculation=drafting(restart, 0.5))
        for number in range(3):
            prompt = said[number] if restart else [*PROMPT, number]
            harness.submit(number, [*prompt, 65 + restart], n_predict=40)
        harness.run()
        for number in range(3):
            prompt = [*(said[number] if restart else [*PROMPT, number]), 65 + restart]
            assert harness.tokens[number] == expected_output(prompt, 40)
            said[number : number + 1] = [[*prompt, *harness.tokens[number]]]
            if restart:
                assert harness.finals[number].usage.n_cached > 16, "the last answer was computed again"
        assert sum(count.n_drafted - count.n_accepted for count in harness.engine.totals.drafts.by_source()) > 5
        harness.engine.close()
        flushed(disk).close()
