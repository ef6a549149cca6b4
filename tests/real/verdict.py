"""Whether answers are those of plain llama.cpp, and where they are not, whether rounding explains it.

An answer is *equal* if all its tokens are. If not, plain llama.cpp is given the answer's own tokens and asked at every
position what it would have chosen from: the *gap* is how far the answer's token lies below the best one. With all gaps
below `MAX_GAP` the answer *rounds* differently; otherwise it is *wrong*. So tokens after the first difference are
judged as well.

Where `MAX_GAP` comes from: llama.cpp alone, given the same tokens in batches of another size, preferred other tokens
with gaps of up to 0.19 (SmolLM2 135M Q4_1; 10 of 1,920 tokens, each logit off by up to 1.4). It is some two and a half
times that. A wrong cell, position or mask gives gaps of several logits at once.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.real.plain import Plain, Shape

MAX_GAP = 0.5
# Of all tokens, those that are not plain llama.cpp's first choice: what it does to itself (0.5 %), four times.
MAX_OFF_SHARE = 0.02

# How the engine computes most prompts of its own: the last token among the streams, all others in the background.
LIKE_THE_ENGINE = Shape(n_rows=512, last_alone=True)


class Verdict(NamedTuple):
    """`n_off` counts tokens that are not plain llama.cpp's first choice, `gap` is the largest of them."""

    mode: str
    n_equal: int
    n_rounded: int
    wrong: tuple[str, ...]
    n_tokens: int
    n_off: int
    gap: float

    def __str__(self) -> str:
        counts = f"{self.n_equal} equal, {self.n_rounded} rounded, {len(self.wrong)} wrong"
        return f"{self.mode}: {counts}; {self.n_off} of {self.n_tokens} tokens off, largest gap {self.gap:.3f}"

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong, and no more is rounded than llama.cpp does to itself. A handful may always be off."""
        return not self.wrong and self.n_off <= max(3, MAX_OFF_SHARE * self.n_tokens)


def judge(
    mode: str, plain: Plain, prompts: list[list[int]], answers: list[list[int]], expected: list[list[int]]
) -> Verdict:
    """Compare `answers` with those that plain llama.cpp gave to the same prompts."""
    n_equal = n_rounded = n_off = 0
    worst, wrong = 0.0, []
    for at, (prompt, answer, plain_answer) in enumerate(zip(prompts, answers, expected, strict=True)):
        assert len(answer) == len(plain_answer)
        if answer == plain_answer:
            n_equal += 1
            continue
        logits = plain.logits_along(prompt, answer, LIKE_THE_ENGINE)
        gaps = [float(row.max() - row[token]) for row, token in zip(logits, answer, strict=True)]
        n_off += sum(gap > 0 for gap in gaps)
        worst = max(worst, *gaps)
        if max(gaps) < MAX_GAP:
            n_rounded += 1
        else:
            first = next(index for index, gap in enumerate(gaps) if gap >= MAX_GAP)
            wrong.append(f"prompt {at} ({len(prompt)} tokens) at token {first}: gap {gaps[first]:.3f}")
    return Verdict(mode, n_equal, n_rounded, tuple(wrong), sum(map(len, answers)), n_off, worst)
