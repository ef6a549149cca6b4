"""Whole answers with a draft model: the same as without, in fewer steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.engine import Limits
from localrun.engine.speculate import choice
from localrun.engine.speculate.choice import DraftChoice, DraftStream, RowCosts
from localrun.engine.speculate.draft_model import DraftModel, DraftModels
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import DraftSource, Sampling, Submit
from tests.engine.conftest import open_tiny
from tests.engine.harness import Harness
from tests.engine.speculate.drafters import always
from tests.engine.speculate.fake_draft import FakeDraftContext, check_books
from tests.engine.stepped import SteppedEngine
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import digest_after, next_token

N_TOKENS = 24
# Of the draft model's tokens, where it is the model itself: batches of other sizes round otherwise.
LEAST_ACCEPTED = 0.85


def eager(streams: Sequence[DraftStream], costs: RowCosts, limits: choice.DraftLimits) -> DraftChoice | None:
    """Up to three tokens for everybody, whatever it costs."""
    n_each = min(3, limits.most_each, limits.most_rows // len(streams))
    if n_each <= 0 or not any(stream.chances for stream in streams):
        return None
    n_rows = tuple(n_each if limits.is_even or stream.chances else 0 for stream in streams)
    return DraftChoice(n_rows, 1.0, 1.0 + n_each)


def drafting(open_draft: Callable[[], DraftModel]) -> Callable[[FakeBackend, Callable[[], float]], Speculation]:
    models = DraftModels(lambda path, is_wanted: open_draft(), "own")
    return lambda backend, clock: Speculation(backend, clock, drafter_of=models.drafter_for, policy=always(eager))


def without_drafts(prompt: list[int], n_tokens: int) -> list[int]:
    digest, answer = 0, []
    for token in prompt:
        digest = digest_after(digest, token)
    for _ in range(n_tokens):
        answer.append(next_token(digest, ignore_eos=True))
        digest = digest_after(digest, answer[-1])
    return answer


def letters(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(97, 123) for _ in range(length)]


def test_a_good_draft_model_gives_several_tokens_a_step():
    context = FakeDraftContext()
    harness = Harness(speculation=drafting(lambda: DraftModel(context, time.perf_counter)))
    prompt = letters(random.Random(5), 20)
    harness.submit(1, prompt, n_predict=N_TOKENS)
    harness.run()
    assert harness.tokens[1] == without_drafts(prompt, N_TOKENS)
    (counts,) = harness.finals[1].usage.drafts
    assert counts.source is DraftSource.DRAFT_MODEL
    assert counts.n_accepted > N_TOKENS / 2
    assert len(harness.steps) < N_TOKENS / 2


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30), wrong_one_in=st.sampled_from([0, 2, 5]), n_seqs=st.integers(1, 4),
    is_split=st.booleans(), n_batch=st.integers(8, 64),
)  # fmt: skip
def test_answers_are_the_same_with_any_draft_model(
    seed: int, wrong_one_in: int, n_seqs: int, is_split: bool, n_batch: int
):
    draw = random.Random(seed)
    context = FakeDraftContext(
        n_seqs=n_seqs, n_batch=n_batch, wrong_one_in=wrong_one_in, n_cells=draw.randrange(60, 300)
    )
    model = DraftModel(context, time.perf_counter)
    harness = Harness(speculation=drafting(lambda: model), is_split=is_split, n_cells=512)
    prompts = {number: letters(draw, draw.randrange(1, 60)) for number in range(1, 7)}
    for number, prompt in prompts.items():
        harness.submit(number, prompt, n_predict=N_TOKENS)
        for _ in range(draw.randrange(0, 12)):
            harness.step()
            check_books(model)
        if draw.random() < 0.2:
            harness.engine.cancel(draw.randrange(1, number + 1))
    harness.run()
    assert not model._of, "ended requests are still known"
    for number, prompt in prompts.items():
        tokens = harness.tokens.get(number, [])
        assert tokens == without_drafts(prompt, N_TOKENS)[: len(tokens)]


@pytest.mark.parametrize("may_split", [False, True], ids=["one pool", "split"])
def test_a_real_model_drafts_for_itself(tiny_gguf: Path, may_split: bool):
    backend = open_tiny(tiny_gguf, n_cells=1024, n_seqs=4, n_batch=64, may_split=may_split)
    models = DraftModels(
        lambda path, is_wanted: DraftModel(backend.open_draft(path, is_wanted), time.perf_counter, least_chance=0.0),
        str(tiny_gguf),
    )
    speculation = Speculation(backend, time.perf_counter, drafter_of=models.drafter_for, policy=always(eager))
    engine = SteppedEngine(backend, Limits(4, 16, 0.0, 1 << 20), time.perf_counter, speculation=speculation)
    greedy = Sampling(temperature=0)
    for number in range(4):
        prompt = [300 + (number * 131 + at * 7) % 900 for at in range(30)]
        engine.submit(Submit(id=number, sampling=greedy, n_predict=N_TOKENS, ignore_eos=True), prompt)
    n_output = 0
    while not engine.is_idle:
        step = engine.step()
        n_output += sum(len(delta.tokens) for delta in step.deltas) if step is not None else 0
    assert n_output == 4 * N_TOKENS
    counts = {counts.source: counts for counts in speculation.counts.by_source()}[DraftSource.DRAFT_MODEL]
    assert counts.n_drafted > N_TOKENS
    assert counts.n_accepted >= LEAST_ACCEPTED * counts.n_drafted
    engine.close()
    models.close()
    backend.close()
