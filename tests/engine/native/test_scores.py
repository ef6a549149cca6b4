"""Log-probabilities of prompts are those of bare calls of the library, whatever else runs, and hold nobody up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.request import SCORED_ROWS
from localrun.wire import ChosenLogprob, Delta, Finish, Sampling, Submit
from tests.engine.conftest import open_tiny
from tests.engine.native.bare import bare
from tests.engine.stepped import SteppedEngine

ROUNDING = 0.02  # of a log-probability
LAYOUTS: dict[str, dict[str, Any]] = {"one pool": {}, "split": {"may_split": True}}
PROMPT = [256 + at * 7 % 300 for at in range(150)]


@pytest.fixture(scope="module", params=LAYOUTS)
def backend(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[LlamaBackend]:
    opened = open_tiny(tiny_gguf, n_cells=1024, n_seqs=4, **LAYOUTS[request.param])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def logprobs(tiny_gguf: Path) -> Iterator[Any]:
    """The log-probability of each token of a prompt after those before it, by bare calls."""
    with bare(tiny_gguf, []) as model:

        def of(tokens: list[int]) -> list[float]:
            rows = model.logits(tokens).astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            return [float(rows[at, token]) for at, token in enumerate(tokens[1:])]

        yield of


def scored(number: int, n_predict: int = 1) -> Submit:
    return Submit(
        id=number, sampling=Sampling(temperature=0), n_predict=n_predict, logprobs=True, n_probs=2, scores_prompt=True,
        ignore_eos=True,
    )  # fmt: skip


class Run:
    """An engine that is stepped until it is idle, and what it said."""

    def __init__(self, backend: LlamaBackend, n_slots: int = 4) -> None:
        self.engine = SteppedEngine(backend, Limits(n_slots, 16, 0.0, 1 << 20), time.monotonic)
        self.backend = backend
        self.scores: dict[int, list[ChosenLogprob]] = {}
        self.last: dict[int, Delta] = {}
        self.tokens: dict[int, list[int]] = {}
        self.most_scores = self.n_preempted = 0

    def step(self) -> None:
        step = self.engine.step()
        for delta in step.deltas if step is not None else ():
            self.tokens.setdefault(delta.id, []).extend(delta.tokens)
            self.last[delta.id] = delta
            if delta.scores is not None:
                kept = self.scores.setdefault(delta.id, [])
                assert delta.scores.first == len(kept), "said twice, or left out"
                kept.extend(delta.scores.tokens)
                self.most_scores = max(self.most_scores, len(delta.scores.tokens))

    def to_the_end(self) -> None:
        while not self.engine.is_idle:
            self.step()
            self.engine.cache.check_integrity()
        self.n_preempted = self.engine.totals.preemptions
        self.engine.close()
        self.backend.rebuild()


def check(said: list[ChosenLogprob], tokens: list[int], expected: list[float]) -> None:
    assert [one.token for one in said] == tokens
    assert (said[0].logprob, said[0].top) == (0.0, ())
    for one, logprob in zip(said[1:], expected, strict=True):
        assert one.logprob == pytest.approx(logprob, abs=ROUNDING)
        assert len(one.top) == 2
        assert one.top[0].logprob >= max(one.top[1].logprob, one.logprob)


@pytest.mark.parametrize("n_predict", [0, 1, 5])
@pytest.mark.parametrize("n_prompt", [1, 2, SCORED_ROWS, SCORED_ROWS + 1, SCORED_ROWS + 2, 150])
def test_a_prompt_of_any_length(backend: LlamaBackend, logprobs: Any, n_prompt: int, n_predict: int):
    run, prompt = Run(backend), PROMPT[:n_prompt]
    run.engine.submit(scored(1, n_predict), list(prompt))
    run.to_the_end()
    check(run.scores[1], prompt, logprobs(prompt))
    assert len(run.tokens[1]) == n_predict
    usage = run.last[1].usage
    assert usage is not None
    assert (usage.n_prompt, usage.n_output, usage.n_cached) == (n_prompt, n_predict, 0)
    assert run.last[1].finish is Finish.LENGTH
    assert run.most_scores <= SCORED_ROWS + 1


def test_what_the_cache_has_is_computed_again_and_nothing_is_kept_of_it(backend: LlamaBackend, logprobs: Any):
    run = Run(backend)
    for number in (1, 2, 3):
        submit = scored(number) if number == 2 else Submit(id=number, sampling=Sampling(temperature=0), n_predict=3)
        run.engine.submit(submit, list(PROMPT))
        while not run.engine.is_idle:
            run.step()
    run.to_the_end()
    check(run.scores[2], PROMPT, logprobs(PROMPT))
    assert [run.last[number].usage.n_cached > 0 for number in (1, 2, 3)] == [False, False, True]  # type: ignore[union-attr]
    assert run.tokens[2] == run.tokens[1][:1] == run.tokens[3][:1]


def test_several_at_once_beside_streams_that_go_on(backend: LlamaBackend, logprobs: Any):
    run = Run(backend)
    stream = Submit(id=9, sampling=Sampling(temperature=0), n_predict=150, ignore_eos=True, target_itl_s=0.001)
    run.engine.submit(stream, PROMPT[:20])
    prompts = {number: PROMPT[number * 10 : number * 10 + 100] for number in (1, 2, 3)}
    for _ in range(5):
        run.step()
    before = len(run.tokens[9])
    for number, prompt in prompts.items():
        run.engine.submit(scored(number), list(prompt))
    n_steps = 0
    while any(number not in run.last or run.last[number].finish is None for number in prompts):
        run.step()
        n_steps += run.last[9].finish is None
        assert sum(request.is_scoring for request in run.engine.scheduler.running) <= 1
    assert len(run.tokens[9]) - before > n_steps / 5, "a stream was held up"
    run.to_the_end()
    for number, prompt in prompts.items():
        check(run.scores[number], prompt, logprobs(prompt))


def test_one_that_loses_its_slot_is_read_anew_and_says_nothing_twice(backend: LlamaBackend, logprobs: Any):
    run = Run(backend)
    run.engine.submit(scored(1, n_predict=4), list(PROMPT))
    while len(run.scores.get(1, ())) < 60:
        run.step()
    (request,) = run.engine.scheduler.running
    run.engine._preempt(request)
    run.engine.cache.check_integrity()
    run.to_the_end()
    check(run.scores[1], PROMPT, logprobs(PROMPT))
    assert run.n_preempted == 1
    assert len(run.tokens[1]) == 4


def test_one_that_is_cancelled_leaves_nothing(backend: LlamaBackend):
    run = Run(backend)
    run.engine.submit(scored(1), list(PROMPT))
    while 1 not in run.scores:
        run.step()
    run.engine.cancel(1)
    run.to_the_end()
    assert run.last[1].finish is Finish.CANCELLED
