"""Checkpoints on the fake backend: where states are saved, who starts from them, and what goes when memory is short."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.engine.backend import MemoryKind, State
from localrun.engine.cache.copies import CHECKPOINT_GAP_TOKENS, KEPT_CHECKPOINTS
from localrun.engine.cache.tree import PrefixKey
from tests.engine.harness import Harness, expected_output
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import IM_END

SYSTEM = [*b"a system message of some length, for all", IM_END]
GAP = CHECKPOINT_GAP_TOKENS


def message(letter: str, length: int = 50) -> list[int]:
    return [*letter.encode() * (length - 1), IM_END]


def harness(**changed: Any) -> Harness:
    """An engine on such a memory, for which computing is much slower than copying."""
    kinds = {"n_cells": 1024, "n_seqs": 4, "n_slots": 4, "memory_kind": MemoryKind.HYBRID}
    made = Harness(**(kinds | changed))
    made.engine.cache.tiers.recompute_s = lambda start, n_tokens: n_tokens * 1e-3
    return made


def ask(harness: Harness, prompt: list[int], *, n_predict: int = 8) -> int:
    """Run one request to its end and check its output. Returns its cached tokens."""
    request_id = len(harness.finals)
    harness.submit(request_id, prompt, n_predict=n_predict)
    harness.run()
    assert harness.tokens[request_id] == expected_output(prompt, n_predict)
    usage = harness.finals[request_id].usage
    assert usage is not None
    return usage.n_cached


def checkpoints(harness: Harness, tokens: list[int]) -> list[int]:
    """The lengths of all saved beginnings of `tokens`, shortest first."""
    return [state.end for state in harness.engine.cache.tiers.match(PrefixKey(tokens), len(tokens)).states()]


@pytest.mark.parametrize("kind", MemoryKind)
def test_a_prompt_that_parts_within_a_message_starts_where_its_memory_can_be_cut(kind: MemoryKind):
    run = harness(memory_kind=kind)
    ask(run, SYSTEM + message("a"))
    n_common = len(SYSTEM) + 30
    n_cached = ask(run, (SYSTEM + message("a"))[:n_common] + message("b"))
    assert n_cached == (n_common if kind is MemoryKind.ATTENTION else len(SYSTEM))


def test_states_are_saved_behind_the_first_and_the_last_two_messages_and_at_both_ends():
    run = harness()
    prompt = SYSTEM + message("a") + message("b") + message("c") + message("d", 60) + [*b"x" * 40]
    ask(run, prompt, n_predict=50)
    ends = [index + 1 for index, token in enumerate(prompt) if token == IM_END]
    # Five places, of which the fourth from the end is one too many.
    assert checkpoints(run, prompt + run.tokens[0]) == [ends[0], ends[-1], len(prompt) - 1, len(prompt) + 49]


def test_what_the_template_puts_after_the_last_message_gets_no_checkpoint_of_its_own():
    run = harness()
    messages = SYSTEM + message("a")
    prompt = [*messages, *b"assistant: "]
    ask(run, prompt)
    assert checkpoints(run, prompt) == [len(SYSTEM), len(messages)]


def test_checkpoints_keep_their_distance():
    run = harness()
    ask(run, [*b"hi", IM_END, *b"how are you", IM_END], n_predict=4)
    assert len(run.engine.cache.tiers) == 0
    prompt = SYSTEM + message("a", 10) + message("b", 10)
    ask(run, prompt, n_predict=8)
    assert checkpoints(run, prompt) == [len(SYSTEM)]


def test_a_conversation_that_grows_keeps_its_beginning_and_its_last_states():
    run = harness(n_cells=4096)
    prompt, n_cached = SYSTEM + message("a"), []
    for turn in range(6):
        n_cached.append(ask(run, prompt, n_predict=40))
        prompt = prompt + run.tokens[turn] + [IM_END] + message("u", 60)
    lengths = checkpoints(run, prompt)
    assert len(lengths) == KEPT_CHECKPOINTS
    assert lengths[0] == len(SYSTEM)
    assert n_cached[1:] == [len(SYSTEM) + 50 + 39 + 101 * turn for turn in range(5)]


def test_a_long_conversation_does_not_cost_others_what_they_have_in_common_with_it():
    run = harness(n_cells=4096)
    document = [*SYSTEM, *(b"z" * 150)]
    for letter in "abcd":
        ask(run, document + message(letter, 60))
    assert len(document) in checkpoints(run, document + message("d", 60))
    prompt = document + message("d", 60)
    for _ in range(5):
        ask(run, prompt, n_predict=40)
        prompt = prompt + run.tokens[len(run.finals) - 1] + [IM_END] + message("u", 60)
    assert ask(run, document + message("e", 60)) == len(document)


def test_a_step_ends_at_a_checkpoint_even_where_the_batch_has_room():
    run = harness(n_batch=256)
    prompt = SYSTEM + message("a", 100)
    run.submit(0, prompt, n_predict=1)
    computed = []
    while not run.engine.is_idle:
        run.step()
        computed.append(run.backend.n_rows_computed)
    assert computed[:3] == [len(SYSTEM), len(prompt) - 1, len(prompt)]


def test_what_two_prompts_in_turn_have_in_common_is_there_for_the_third():
    run = harness()
    prompts = [[*b"z" * 100, *bytes([97 + index]) * 60] for index in range(3)]
    assert [ask(run, prompt) for prompt in prompts] == [0, 0, 100]


def test_eight_cold_prompts_compute_their_common_beginning_once():
    run = harness(n_seqs=8, n_slots=8)
    common = [*b"z" * 200]
    for index in range(8):
        run.submit(index, [*common, *(bytes([97 + index]) * 30)], n_predict=8)
    run.run()
    # Of eight tokens of output the last one is never computed.
    assert run.backend.n_rows_computed == 200 + 8 * (30 + 7)
    for index in range(8):
        assert run.tokens[index] == expected_output([*common, *(bytes([97 + index]) * 30)], 8)


def test_nobody_waits_for_a_beginning_that_is_not_worth_a_checkpoint():
    run = harness()
    for index in range(2):
        run.submit(index, [*b"z" * (GAP - 1), *bytes([97 + index]) * 60], n_predict=1)
    step = run.step()
    assert step is not None
    assert len(step.started) == 2


def test_a_follower_goes_on_when_its_leader_is_cancelled():
    run = harness(n_batch=32)
    prompt = [*b"z" * 200]
    run.submit(0, [*prompt, 1], n_predict=4)
    run.submit(1, [*prompt, 2], n_predict=4)
    run.step()
    run.engine.cancel(0)
    run.run()
    assert run.tokens[1] == expected_output([*prompt, 2], 4)


def test_an_ended_request_can_be_continued_before_its_state_was_moved():
    run = harness()
    prompt = SYSTEM + message("a")
    run.submit(0, prompt, n_predict=40)
    while 0 not in run.finals:
        run.step()
    assert run.engine.cache.can_save_next
    more = prompt + run.tokens[0] + message("b")
    assert ask(run, more) == len(prompt) + 39


def test_states_that_end_together_are_moved_one_a_step():
    run = harness()
    for index in range(4):
        run.submit(index, [*bytes([97 + index]) * 60], n_predict=400)
    while min(len(run.tokens.get(index, [])) for index in range(4)) < 40:
        run.step()
    for index in range(4):
        run.engine.cancel(index)
    saved = []
    while run.engine.cache.can_save_next:
        saved.append(len(run.engine.cache.tiers))
        run.step()
    assert len(saved) == 4
    assert saved == sorted(set(saved))


def test_a_full_pool_preempts_and_states_come_back_from_memory():
    run = harness(n_cells=256)
    for index in range(3):
        run.submit(index, [*bytes([97 + index]) * 50], n_predict=80)
    run.run()
    assert run.engine.totals.preemptions > 0
    assert run.engine.totals.prefill_tokens < 150 + run.engine.totals.preemptions * GAP
    for index in range(3):
        assert run.tokens[index] == expected_output([*bytes([97 + index]) * 50], 80)


def test_with_little_memory_old_states_go_and_answers_stay_right():
    run = harness(ram_cache_bytes=900)
    prompts = [SYSTEM + message(letter) for letter in "abcdef"]
    for prompt in [*prompts, *prompts]:
        ask(run, prompt)
    assert 0 < run.engine.cache.tiers.size_bytes <= 900


def count_copies(harness: Harness) -> list[str]:
    """Notes every state that is saved or restored from now on."""
    copies: list[str] = []
    state_get, state_set = harness.backend.state_get, harness.backend.state_set

    def get(seq: int, *, limit_bytes: int) -> bytearray | None:
        state = state_get(seq, limit_bytes=limit_bytes)
        if state is not None:
            copies.append("save")
        return state

    def put(seq: int, state: State) -> bool:
        copies.append("restore")
        return state_set(seq, state)

    harness.backend.state_get, harness.backend.state_set = get, put  # type: ignore[method-assign]
    return copies


def turns(harness: Harness, n_turns: int) -> list[tuple[int, int]]:
    """A conversation's cached tokens in each turn, and how many there could have been."""
    prompt, n_held, found = SYSTEM + message("a"), 0, []
    for _ in range(n_turns):
        found.append((ask(harness, prompt, n_predict=10), n_held))
        n_held = len(prompt) + 9
        prompt = prompt + harness.tokens[len(harness.finals) - 1] + [IM_END] + message("u")
    return found


@pytest.mark.parametrize("kind", [kind for kind in MemoryKind if kind is not MemoryKind.ATTENTION])
@pytest.mark.parametrize("ram_cache_bytes", [0, 100, 1 << 20])
def test_a_conversation_goes_on_in_its_cells_whatever_fits_memory(kind: MemoryKind, ram_cache_bytes: int):
    run = harness(memory_kind=kind, ram_cache_bytes=ram_cache_bytes)
    copies = count_copies(run)
    assert [n_cached == n_held for n_cached, n_held in turns(run, 5)] == [True] * 5
    assert "restore" not in copies
    assert ("save" in copies) == (ram_cache_bytes == 1 << 20)


def test_a_conversation_that_had_to_give_way_comes_back_from_memory():
    run = harness()
    copies = count_copies(run)
    prompt = SYSTEM + message("a")
    ask(run, prompt, n_predict=40)
    ask(run, message("b"))
    assert ask(run, prompt + run.tokens[0] + message("c")) == len(prompt) + 39
    assert copies.count("restore") == 1


def test_going_on_in_place_counts_as_a_start_from_the_checkpoint_there():
    run = harness()
    ask(run, SYSTEM, n_predict=40)
    answered = SYSTEM + run.tokens[0]
    for letter in "ab":
        assert ask(run, answered + message(letter)) == len(answered) - 1
    fork = run.engine.cache.tiers.match(PrefixKey(answered), len(answered)).states()[-1]
    assert fork.end == len(answered) - 1
    assert fork.n_starts == 2


def test_what_was_saved_takes_no_cells_beside_what_runs():
    run = harness()
    for letter in "abc":
        ask(run, [*letter.encode() * 60], n_predict=40)
        assert run.backend.n_used == 99, "those of the last one alone"
    run.submit(3, [*b"d" * 60], n_predict=40)
    run.step()
    assert run.backend.n_used == 59


def test_what_is_too_large_for_memory_keeps_its_cells_until_others_need_them():
    run = harness(ram_cache_bytes=100, n_cells=256)
    first, second = [*b"a" * 90], [*b"b" * 90]
    ask(run, first)
    ask(run, second)
    assert run.backend.n_used == 2 * 97
    assert ask(run, first + run.tokens[0] + message("c", 20)) == 97
    assert ask(run, second + run.tokens[1] + message("c", 20)) == 97
    ask(run, [*b"c" * 90])
    assert ask(run, [*b"d" * 90]) == 0
    run.check()


def test_two_that_go_on_from_one_state_both_find_it():
    run = harness()
    prompt = SYSTEM + message("a")
    run.submit(0, prompt, n_predict=40)
    while 0 not in run.finals:
        run.step()
    assert run.engine.cache.can_save_next
    for index in (1, 2):
        run.submit(index, prompt + run.tokens[0] + message("bc"[index - 1]), n_predict=4)
    run.run()
    assert [run.finals[index].usage.n_cached for index in (1, 2)] == [len(prompt) + 39] * 2


def test_the_books_are_checked():
    run = harness()
    run.submit(0, SYSTEM, n_predict=8)
    run.step()
    run.engine.cache.tiers.park(run.engine.scheduler.running[0].seq, None)
    with pytest.raises(AssertionError, match="double"):
        run.engine.cache.check_integrity()


def test_the_fake_refuses_what_such_a_memory_refuses():
    backend = FakeBackend(n_cells=256, n_seqs=2, n_batch=16, memory_kind=MemoryKind.RECURRENT)
    backend.batch.token[:8] = 65
    backend.batch.pos[:8] = range(8)
    backend.batch.seq[:8] = 0
    backend.decode(8)
    assert not backend.seq_remove(0, 4)
    assert not backend.seq_remove(0, 0, 4)
    assert backend.seq_remove(0, 8)
    assert backend.tokens_of(0) == [65] * 8
    with pytest.raises(ValueError, match="share"):
        backend.seq_share(0, 1, 0, 8)
    assert backend.seq_remove(0, 0)
    assert backend.n_used == 0


def test_a_copy_that_takes_longer_than_computing_is_not_made_and_tried_again_some_day():
    run = harness()
    slow_s, state_get = 1.0, run.backend.state_get

    def slow(seq: int, *, limit_bytes: int) -> bytearray | None:
        run.now_s += slow_s
        return state_get(seq, limit_bytes=limit_bytes)

    run.backend.state_get = slow  # type: ignore[method-assign]
    ask(run, SYSTEM + message("a"), n_predict=1)
    assert len(run.engine.cache.tiers) == 1, "the first one shows what a copy takes"
    ask(run, SYSTEM + message("b"), n_predict=1)
    assert len(run.engine.cache.tiers) == 1
    slow_s = 0.0
    for index in range(20):
        ask(run, [*bytes([97 + index]) * 80], n_predict=1)
    assert len(run.engine.cache.tiers) > 10


def test_a_stranger_takes_the_cells_of_what_is_saved_and_not_of_what_cannot_be():
    """The long chat's state is too large for memory."""
    run = Harness(n_cells=600, n_slots=2, n_seqs=2, memory_kind=MemoryKind.HYBRID, ram_cache_bytes=400)
    run.engine.cache.tiers.recompute_s = lambda start, n_tokens: n_tokens * 0.1
    long = [97 + at % 20 for at in range(200)]
    run.submit(1, long, n_predict=3)
    run.submit(2, [40 + at % 17 for at in range(40)], n_predict=40)
    run.run()
    run.submit(3, [66] * 30, n_predict=3)
    run.run()
    assert run.engine.cache.match(PrefixKey([*long, *run.tokens[1], 5])) >= len(long)
