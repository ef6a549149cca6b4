"""Greedy answers with drafts part from those without only where llama.cpp's own rounding does it.

Drafts are rows more in a batch, and with another number of rows llama.cpp takes other kernels. So a text may change,
but only at tokens of which two are about as likely: where answers part, `verdict.py` holds them against plain
llama.cpp. With the same number of rows in every step the kernels are the same, whether the drafts are right or not; a
wrong draft that left something behind would show there, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.real.conftest import HOW_MUCH, N_TOKENS, RealModel
from tests.real.runner import Given
from tests.real.verdict import Verdict, judge

Say = Callable[[str], None]


def _answers(model: RealModel, draft: Given | None, *, together: bool = False) -> tuple[list[list[int]], int, int, int]:
    """The answers, how many tokens were drafted and accepted, and how many batches had as many rows as drafts make."""
    runner = model.run(draft=draft)
    n_rows: list[int] = []
    if together:
        answers = runner.ask(*model.prompts, n_tokens=N_TOKENS)
        n_rows += runner.n_rows
    else:
        answers = []
        for prompt in model.prompts:
            answers += runner.ask(prompt, n_tokens=N_TOKENS)
            n_rows += runner.n_rows
    counts = [each for usage in runner.usages.values() for each in usage.drafts]
    runner.close()
    n_full = sum(draft is not None and rows == 1 + draft.n_most for rows in n_rows)
    return answers, sum(each.n_drafted for each in counts), sum(each.n_accepted for each in counts), n_full


def _compared(
    model: RealModel, name: str, answers: list[list[int]], without: list[list[int]], n_drafted: int, n_accepted: int
) -> Verdict:
    mode = f"{model.name}, {name}, {n_accepted} of {n_drafted} drafted tokens accepted, against none"
    return judge(mode, model.plain, model.prompts, answers, without, together=True)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("n_drafts", [1, 3, 7] if HOW_MUCH == "all" else [3])
def test_drafts_change_no_more_than_rounding(
    model: RealModel, say: Say, n_drafts: int, *, wrong: bool, together: bool
) -> None:
    without, *_ = _answers(model, None, together=together)
    draft = Given(model.prompts, without, n_drafts, wrong=wrong)
    answers, n_drafted, n_accepted, _ = _answers(model, draft, together=together)
    name = f"{n_drafts} {'wrong' if wrong else 'right'} drafts{', eight at once' if together else ''}"
    verdict = _compared(model, name, answers, without, n_drafted, n_accepted)
    say(str(verdict))
    assert draft.n_on_course > 0
    # A right draft turns wrong where a text has parted, which rounding may do early, and a wrong one is right by chance
    # only there.
    assert n_accepted < 0.3 * n_drafted if wrong else n_accepted > 0.5 * draft.n_on_course
    assert verdict.is_sound


@pytest.mark.skipif(HOW_MUCH != "all", reason="takes minutes: REAL=all")
def test_with_equal_rows_right_and_wrong_drafts_differ_no_more_than_rounding(model: RealModel, say: Say) -> None:
    """Four rows in every step. The last tokens, for which no four rows are left, are not compared."""
    without, *_ = _answers(model, None)
    right, n_drafted, n_accepted, n_full = _answers(model, Given(model.prompts, without, 3))
    wrong, _, _, n_full_wrong = _answers(model, Given(model.prompts, without, 3, wrong=True))
    n_same = sum(one[:-4] == other[:-4] for one, other in zip(right, wrong, strict=True))
    say(
        f"{model.name}, four rows in {n_full} steps with right drafts and {n_full_wrong} with wrong ones: {n_same} of "
        f"{len(right)} answers the same; {n_accepted} of {n_drafted} right ones accepted"
    )
    assert n_full < n_full_wrong
    verdict = judge(f"{model.name}, right drafts against wrong ones, four rows each", model.plain, model.prompts,
                    [answer[:-4] for answer in right], [answer[:-4] for answer in wrong], together=True)  # fmt: skip
    say(str(verdict))
    assert verdict.is_sound
