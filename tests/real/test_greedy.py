"""Greedy answers of real models are those of plain llama.cpp, wherever the prompt's state comes from.

What differs must be rounding, by `verdict.py`, and rare. Every verdict is printed at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.conftest import N_TOKENS, RealModel
from tests.real.prompts import fixed_text, opening, turn
from tests.real.verdict import ALONE, judge

Say = Callable[[str], None]
# What is kept of a prompt has at least so many tokens, a request waits for nothing shorter, and whole states are so
# many tokens apart.
KEPT_TOKENS = 32


@pytest.mark.parametrize("together", [False, True])
def test_a_lost_cell_is_found(model: RealModel, say: Say, *, together: bool) -> None:
    """What the other tests would say of an engine that forgets a token in the middle of every prompt."""
    lost = [prompt[: len(prompt) // 2] + prompt[len(prompt) // 2 + 1 :] or prompt for prompt in model.prompts]
    answers = [model.plain.greedy(prompt, N_TOKENS, ALONE) for prompt in lost]
    verdict = model.judge("a cell of every prompt lost", answers, together=together)
    say(str(verdict))
    assert not verdict.is_sound


def test_cold_cached_and_after_a_restart(model: RealModel, tmp_path: Path, say: Say) -> None:
    first = model.run(kv_folder=tmp_path)
    cold = model.judge("cold and shared beginnings", first.ask_one_by_one(model.prompts, n_tokens=N_TOKENS))
    n_shared = sum(cached >= KEPT_TOKENS for cached in first.n_cached)
    cached = model.judge("the same prompts again", first.ask_one_by_one(model.prompts, n_tokens=N_TOKENS))
    first.close()
    second = model.run(kv_folder=tmp_path)
    restarted = model.judge("after a restart", second.ask_one_by_one(model.prompts, n_tokens=N_TOKENS))
    second.close()
    for verdict in (cold, cached, restarted):
        say(str(verdict))
    again, from_disk = first.n_cached[len(model.prompts) :], second.n_cached
    say(f"{model.name}, prompts that began with cached tokens: {n_shared} at first, then {sum(map(bool, again))}, "
        f"{sum(map(bool, from_disk))} after the restart, of {len(model.prompts)}")  # fmt: skip
    # Whole states are saved where a second prompt parts from the first, so that the third goes on from there.
    assert n_shared >= (1 if model.is_window else 3)
    for prompt, in_memory, on_disk in zip(model.prompts, again, from_disk, strict=True):
        if len(prompt) > 2 * KEPT_TOKENS:
            assert in_memory >= len(prompt) - KEPT_TOKENS
            assert on_disk >= len(prompt) - KEPT_TOKENS
    assert all(verdict.is_sound for verdict in (cold, cached, restarted))


def test_in_one_pool(model: RealModel, say: Say) -> None:
    if model.is_window:
        pytest.skip("a sliding window is never split")
    runner = model.run(split=False)
    verdicts = [
        model.judge(f"one pool, {when}", runner.ask_one_by_one(model.prompts, n_tokens=N_TOKENS))
        for when in ("cold and shared beginnings", "the same prompts again")
    ]
    runner.close()
    for verdict in verdicts:
        say(str(verdict))
        assert verdict.is_sound


def test_with_a_q8_0_cache(model: RealModel, say: Say) -> None:
    plain = model.open_plain("q8_0")
    expected = [plain.greedy(prompt, N_TOKENS, ALONE) for prompt in model.prompts]
    runner = model.run(kv_type="q8_0")
    verdicts = [
        judge(f"{model.name}, q8_0 {when}", plain, model.prompts,
              runner.ask_one_by_one(model.prompts, n_tokens=N_TOKENS), expected)
        for when in ("cold and shared beginnings", "the same prompts again")
    ]  # fmt: skip
    runner.close()
    plain.close()
    for verdict in verdicts:
        say(str(verdict))
        assert verdict.is_sound


def test_eight_at_once(model: RealModel, say: Say) -> None:
    """Rows of eight streams are computed together, in other shapes than one alone."""
    runner = model.run()
    verdict = model.judge("eight at once", runner.ask(*model.prompts, n_tokens=N_TOKENS), together=True)
    runner.close()
    say(str(verdict))
    assert verdict.is_sound


def test_eight_at_once_when_one_needs_more_than_a_stream(model: RealModel, say: Say) -> None:
    """Who outgrows a stream goes on in the pool beside the streams, where rows are computed in other cells."""
    if model.is_window:
        pytest.skip("a sliding window is never split")
    runner = model.run(n_cells=8 * 512)
    verdict = model.judge(
        "eight at once, streams too short", runner.ask(*model.prompts, n_tokens=N_TOKENS), together=True
    )
    had_long_ones = runner.had_long_ones
    runner.close()
    say(str(verdict))
    assert had_long_ones
    assert verdict.is_sound


def test_after_preemption(model: RealModel, say: Say) -> None:
    """The pool is too small for the eight that want to run, so some are set aside and come back."""
    prompts = [prompt for prompt in model.prompts if len(prompt) < 60]
    # They are let in by what they need at once, and outgrow it.
    expected = [model.plain.greedy(prompt, 48, ALONE) for prompt in prompts]
    runner = model.run(split=False, n_cells=256)
    answers = runner.ask(*prompts, n_tokens=48)
    n_preempted = runner.engine.totals.preemptions
    runner.close()
    verdict = judge(f"{model.name}, {n_preempted} preemptions", model.plain, prompts, answers, expected, together=True)
    say(str(verdict))
    assert n_preempted > 0
    assert verdict.is_sound


def test_a_conversation_that_grows_over_the_window(model: RealModel, say: Say) -> None:
    """Seven turns of some 200 tokens. Each goes on from the state that the one before left, and Gemma's window of 512
    has moved on by then. Plain llama.cpp is given the same batches, so nothing but equal is right."""
    runner = model.run()
    words, history = fixed_text().split(), model.plain.tokenize("")
    prompts, n_equal = [], 0
    for at in range(7):
        said = " ".join(words[150 * at : 150 * (at + 1)]) + "\nWhat is this about?"
        text = turn(model.name, "user", said) + opening(model.name)
        prompt = history + _without_bos(model, text)
        (answer,) = runner.ask(prompt, n_tokens=N_TOKENS)
        prompts.append(prompt)
        rows = model.plain.replay(prompt + answer, runner.n_cached[-1], runner.n_rows)[-N_TOKENS:]
        n_equal += answer == [int(model.plain.without_ends(row).argmax()) for row in rows]
        history = prompt + answer + _without_bos(model, "<end_of_turn>\n" if model.is_window else "<|im_end|>\n")
    n_cached = runner.n_cached
    runner.close()
    say(f"{model.name}, a conversation of {len(prompts[-1])} tokens: {n_equal} of {len(prompts)} answers equal")
    for before, prompt, cached in zip(prompts[:-1], prompts[1:], n_cached[1:], strict=True):
        assert len(before) - KEPT_TOKENS <= cached < len(prompt), "a turn did not go on from the one before"
    assert n_equal == len(prompts)


def _without_bos(model: RealModel, text: str) -> list[int]:
    bos = model.plain.tokenize("")
    return model.plain.tokenize(text)[len(bos) :]
