"""Steps of the lowest lane are given up for somebody of a higher one, and nobody's answer shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from localrun.engine.backend import MemoryKind, StepAborted
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.pipes import Inbox
from localrun.wire import Lane
from tests.engine.conftest import compute, n_held
from tests.engine.harness import Harness
from tests.engine.speculate.drafters import drafting
from tests.support.synthesis.synthesize import synthesize

GIVES_UP = (MemoryKind.ATTENTION, MemoryKind.WINDOW)
PROMPTS = ["a line of a batch", "another line", "b" * 150, "a line of a batch that is longer than the first one"]


def answers(abort_every: int, *, lanes: tuple[Lane, ...] = (Lane.BATCH,), **options: Any) -> Harness:
    harness = Harness(n_cells=2048, n_batch=64, abort_every=abort_every, **options)
    for at, prompt in enumerate(PROMPTS):
        harness.submit(at, prompt, n_predict=20 + at, lane=lanes[at % len(lanes)])
        harness.step()
    harness.run()
    return harness


@pytest.mark.parametrize("share_right", [None, 0.0, 0.7])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kind", MemoryKind)
def test_answers_of_the_lowest_lane_are_the_same(kind: MemoryKind, is_split: bool, share_right: float | None) -> None:
    if is_split and kind is not MemoryKind.ATTENTION:
        pytest.skip("only attention is split")
    options: dict[str, Any] = {"memory_kind": kind, "is_split": is_split}
    if share_right is not None:
        options["speculation"] = drafting(3, share_right)
    expected, aborted = answers(0, **options), answers(3, **options)
    assert aborted.texts == expected.texts
    assert (aborted.backend.n_given_up > 5) == (kind in GIVES_UP)
    assert expected.backend.n_given_up == 0


def test_a_step_with_anybody_of_a_higher_lane_in_it_is_not_given_up() -> None:
    harness = answers(1, lanes=(Lane.DEFAULT, Lane.INTERACTIVE))
    assert harness.backend.n_given_up == 0
    assert len(harness.finals) == len(PROMPTS)


def test_whoever_waits_has_the_next_step() -> None:
    harness = Harness(n_cells=2048)
    harness.submit(1, "a line of a batch", n_predict=500, lane=Lane.BATCH)
    for _ in range(5):
        harness.step()
    n_tokens = len(harness.texts[1])
    harness.engine.step(lambda: True)
    harness.submit(2, "somebody", n_predict=5, lane=Lane.INTERACTIVE)
    harness.step()
    assert len(harness.texts[2]) == 1
    assert len(harness.texts[1]) <= n_tokens + 1


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("prompt", ["a line of a batch", "b" * 150])
def test_nobody_keeps_a_line_from_its_tokens_who_never_computes_any(prompt: str, is_split: bool) -> None:
    harness = Harness(n_cells=2048, n_batch=64, is_split=is_split)
    harness.submit(0, prompt, n_predict=20, lane=Lane.BATCH)
    n_refused = 0
    while 0 not in harness.finals:
        n_before = harness.backend.n_given_up
        step = harness.engine.step(lambda: True)
        if harness.backend.n_given_up > n_before:
            n_refused += 1
            harness.submit(n_refused, "too long" * 1000, lane=Lane.INTERACTIVE)
            assert n_refused <= 30, "the line has no tokens"
        if step is not None and any(delta.id == 0 and delta.finish for delta in step.deltas):
            break
    assert n_refused >= 20


def test_what_was_given_up_says_nothing_about_what_steps_cost() -> None:
    harness = Harness(n_cells=2048, speculation=drafting(3, 0.7))
    harness.submit(0, "a line of a batch", n_predict=40, lane=Lane.BATCH)
    observed: list[float] = []
    costs = harness.engine._speculation.costs.at(0)
    observe = costs.observe
    costs.observe = lambda n_rows, seconds, ended_at_s: (  # type: ignore[method-assign]
        observed.append(seconds), observe(n_rows, seconds, ended_at_s),
    )[1]  # fmt: skip
    for at in range(1, 25):
        harness.engine.step(lambda preempts=at % 3 == 0: preempts)
        harness.now_s += 1.0 if at % 3 == 0 else 0.0
    assert harness.backend.n_given_up > 5
    assert 5 < len(observed) < 24 - harness.backend.n_given_up
    assert max(observed) < 0.5


def test_only_what_came_since_the_inbox_was_emptied_hurries() -> None:
    inbox: Inbox[list[int]] = Inbox()
    done: list[int] = []
    inbox.put(lambda said: said.append(1))
    assert not inbox.should_abort()
    inbox.put(lambda said: said.append(2), preempts=True)
    assert inbox.should_abort()
    assert inbox.drain(done)
    assert not inbox.should_abort()
    assert done == [1, 2]


# --- llama.cpp ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny", "tiny, split", "tiny-gemma3", "tiny-mamba", "tiny-qwen35"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    name, _, is_split = request.param.partition(", ")
    path = tmp_path_factory.mktemp("hurry") / "model.gguf"
    synthesize(name, "F16", path)
    backend = LlamaBackend(
        str(path), n_cells=1024, n_seqs=4, n_batch=64, n_threads=1, n_gpu_layers=0, kv_type="f16",
        may_split=bool(is_split),
    )  # fmt: skip
    yield backend
    backend.close()


class Countdown:
    """Says True from its nth question on."""

    def __init__(self, n_questions: int) -> None:
        self.n_left = n_questions

    def __call__(self) -> bool:
        self.n_left -= 1
        return self.n_left < 0


def one_row(
    backend: LlamaBackend, seq: int, token: int, pos: int, should_abort: Callable[[], bool] | None
) -> np.ndarray:
    batch = backend.batch
    batch.token[0], batch.pos[0], batch.seq[0], batch.wants_logits[0] = token, pos, seq, 1
    backend.decode(1, should_abort)
    return backend.logits(0).copy()


def test_a_decode_that_was_given_up_leaves_no_trace(backend: LlamaBackend, caplog: pytest.LogCaptureFixture) -> None:
    tokens = [300 + at * 7 % 200 for at in range(90)]
    for seq in (0, 1):
        backend.seq_remove(seq, 0)
        compute(backend, seq, tokens[:40])
        compute(backend, seq, tokens[40:80], start=40)
    n_given_up = 0
    for pos in range(80, 90):
        expected = one_row(backend, 0, tokens[pos], pos, None)
        try:
            logits = one_row(backend, 1, tokens[pos], pos, Countdown(pos - 80))
        except StepAborted:
            n_given_up += 1
            assert n_held(backend, 1) == pos
            logits = one_row(backend, 1, tokens[pos], pos, None)
        assert np.array_equal(logits, expected)
        assert n_held(backend, 1) == pos + 1
    assert n_given_up == (10 if backend.memory_kind in GIVES_UP else 0)
    assert not caplog.records
