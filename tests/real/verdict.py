"""Whether answers are those of plain llama.cpp, and where they are not, whether rounding explains it.

An answer is *equal* if all its tokens are. If not, plain llama.cpp is given the answer's own tokens and asked at every
position what it would have chosen from: the *gap* is how far the answer's token lies below the best one. With all gaps
below a bound the answer *rounds* differently; otherwise it is *wrong*. So tokens after the first difference are judged
as well.

llama.cpp's kernels for one row and for several do not give the same logits, and those of attention depend on the number
of rows too. llama.cpp alone, given the same 40 tokens of Gemma 3 270M Q4_K_M one by one and in batches of four or more,
differs in the median logit of every position by up to 0.8, the largest by 1.2, and prefers another token at one or two
positions. So an answer with a large gap is also held against prompts that were cut elsewhere, and one that was computed
among others against given tokens in batches of two, four and eight rows; the smallest gap of a position counts.

Where the bounds come from: the largest gap of a token that llama.cpp preferred in other batches was 0.19 (SmolLM2 135M
Q4_1, 1,920 tokens, four shapes), and the largest of an engine's answer 0.43 alone (Gemma with a q8_0 cache) and 0.60
among others (Gemma). Of prompts that lost the token in their middle, the short ones give gaps of 0.2 to 7 and the long
ones none: so a verdict is about all answers, and a single lost cell of a long prompt is for `test_perplexity.py`. Of
360 tokens of Gemma's answers alone 4 to 9 were off, from run to run; of answers to prompts that lost a token 29 to 34.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.real.plain import Plain, Shape

MAX_GAP_ALONE, MAX_GAP_TOGETHER = 0.5, 1.0
# How the engine computes a prompt alone: the last token among the streams, all others in the background.
ALONE = Shape(n_rows=512, last_alone=True)
# Its prompt may be cut elsewhere, where it began with cached tokens or a step had little time.
CUT = [Shape(n_rows, last_alone) for n_rows in (512, 64, 8) for last_alone in (False, True)]
# Several at once: whole prompts among the streams or not, and answers in batches of few or many rows.
TOGETHER = [Shape(512, last_alone, n_answer_rows) for last_alone in (False, True) for n_answer_rows in (2, 4, 8)]
# Of all tokens, those that are not the first choice of plain llama.cpp, one row at a time.
MAX_OFF_ALONE, MAX_OFF_TOGETHER = 0.05, 0.08


class Verdict(NamedTuple):
    """`n_off` counts tokens that are not plain llama.cpp's first choice one row at a time, `gap` is the largest gap."""

    mode: str
    n_equal: int
    n_rounded: int
    wrong: tuple[str, ...]
    n_tokens: int
    n_off: int
    gap: float
    most_off: float

    def __str__(self) -> str:
        counts = f"{self.n_equal} equal, {self.n_rounded} rounded, {len(self.wrong)} wrong"
        return f"{self.mode}: {counts}; {self.n_off} of {self.n_tokens} tokens off, largest gap {self.gap:.3f}"

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong, and no more is rounded than may be. A handful of tokens may always be off."""
        return not self.wrong and self.n_off <= max(3, self.most_off * self.n_tokens)


def judge(
    mode: str,
    plain: Plain,
    prompts: list[list[int]],
    answers: list[list[int]],
    expected: list[list[int]],
    *,
    together: bool = False,
) -> Verdict:
    """Compare `answers` with those that plain llama.cpp gave to the same prompts one row at a time."""
    max_gap = MAX_GAP_TOGETHER if together else MAX_GAP_ALONE
    n_equal = n_off = 0
    worst, wrong = 0.0, []
    for at, (prompt, answer, plain_answer) in enumerate(zip(prompts, answers, expected, strict=True)):
        assert len(answer) == len(plain_answer)
        if answer == plain_answer:
            n_equal += 1
            continue
        gaps = _gaps(plain, prompt, answer, ALONE)
        n_off += sum(gap > 0 for gap in gaps)
        shapes = iter(TOGETHER if together else CUT)
        # One wrong answer decides, so further ones are not held against all shapes.
        while max(gaps) >= max_gap and not wrong and (shape := next(shapes, None)):
            gaps = [min(pair) for pair in zip(gaps, _gaps(plain, prompt, answer, shape), strict=True)]
        worst = max(worst, *gaps)
        if max(gaps) >= max_gap:
            first = next(index for index, gap in enumerate(gaps) if gap >= max_gap)
            wrong.append(f"prompt {at} ({len(prompt)} tokens) at token {first}: gap {gaps[first]:.3f}")
    most_off = MAX_OFF_TOGETHER if together else MAX_OFF_ALONE
    n_rounded = len(answers) - n_equal - len(wrong)
    return Verdict(mode, n_equal, n_rounded, tuple(wrong), sum(map(len, answers)), n_off, worst, most_off)


def _gaps(plain: Plain, prompt: list[int], answer: list[int], shape: Shape) -> list[float]:
    logits = plain.logits_along(prompt, answer, shape)
    return [float(row.max() - row[token]) for row, token in zip(logits, answer, strict=True)]
