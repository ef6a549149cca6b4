"""The engine with pictures and sound on real contexts: the same answers alone, beside others, kept and restored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.backend import MediaChunk
from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.sample.text import prompt_of
from localrun.engine.speculate.speculation import Speculation
from localrun.errors import BadRequest
from localrun.wire import Media, Sampling, Submit, Usage
from tests.engine.native.media import PAIRS, Pair, compute, encoded, make_pair, media_file, n_tokens, opened, prompt
from tests.engine.stepped import SteppedEngine

N_PREDICT = 6
ROUNDING = 3e-2
Answer = list[tuple[int, float]]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    # Pictures of 16 rows, so that their tokens are long enough to be shared.
    return make_pair(tmp_path_factory.mktemp("pair"), request.param, image=64)


@pytest.fixture(scope="module", params=["split", "one pool"])
def backend(request: pytest.FixtureRequest, pair: Pair) -> Iterator[LlamaBackend]:
    with opened(pair, split=request.param == "split", n_batch=128) as backend:
        if request.param == "split" and not backend.is_split:
            pytest.skip("this model's states are whole")
        yield backend


class Conversations:
    """An engine, and what it answered."""

    def __init__(self, backend: LlamaBackend) -> None:
        self.backend = backend
        n_away = backend.worker.n_seqs if backend.worker is not None else 0
        for seq in range(backend.n_seqs + n_away):
            backend.seq_remove(seq, 0)
            backend.set_chunks(seq, ())
        speculation = Speculation(backend, time.monotonic, is_on=False)
        self.engine = SteppedEngine(backend, Limits(4, 64, 0.0, 1 << 28), time.monotonic, speculation=speculation)
        self.answers: dict[int, Answer] = {}
        self.usage: dict[int, Usage] = {}
        self.n_encoded = 0

    def ask(self, *prompts: tuple[str | Media, ...]) -> list[Answer]:
        """All at once."""
        first = len(self.answers)
        for number, parts in enumerate(prompts, first):
            submit = Submit(
                id=number, segments=tuple(prompt(*parts)), sampling=Sampling(temperature=0), n_predict=N_PREDICT,
                ignore_eos=True, logprobs=True,
            )  # fmt: skip
            tokens, chunks = prompt_of(self.backend, submit)
            self.answers[number] = []
            self.engine.submit(submit, tokens, (), chunks)
        while not self.engine.is_idle:
            step = self.engine.step()
            if step is None:
                continue
            self.n_encoded = step.stats.media.n_encoded if step.stats.media else 0
            for delta in step.deltas:
                assert delta.error_message is None, delta.error_message
                self.answers[delta.id] += [(chosen.token, chosen.logprob) for chosen in delta.logprobs or ()]
                if delta.usage is not None:
                    self.usage[delta.id] = delta.usage
        return [self.answers[number] for number in range(first, first + len(prompts))]


def greedy(backend: LlamaBackend, *parts: str | Media) -> Answer:
    """The answer by bare calls."""
    assert backend.projector is not None
    pieces = backend.projector.tokenize(prompt(*parts))
    logits, at = compute(backend, 0, pieces).astype(np.float64), n_tokens(pieces)
    answer: Answer = []
    for _ in range(N_PREDICT):
        token = int(logits.argmax())
        answer.append((token, float(logits[token] - np.log(np.exp(logits).sum()))))
        logits = compute(backend, 0, [[token]], start=at).astype(np.float64)
        at += 1
    backend.seq_remove(0, 0)
    return answer


def check(answers: list[Answer], expected: list[Answer]) -> None:
    """The same tokens, and as likely but for rounding: random models often say the same of different pictures."""
    for answer, one in zip(answers, expected, strict=True):
        assert [token for token, _ in answer] == [token for token, _ in one]
        np.testing.assert_allclose([logprob for _, logprob in answer], [logprob for _, logprob in one], atol=ROUNDING)


LONG = "this is a long text about nothing at all that goes on and on " * 8


def test_answers_are_the_same_alone_beside_others_kept_and_restored(backend: LlamaBackend, pair: Pair, tmp_path: Path):
    one, other = (media_file(tmp_path, pair, seed) for seed in (1, 2))
    asked = [(LONG, one, " what is it"), (LONG, other, " what is it"), (one, LONG, other, " and"), (LONG, " so")]
    Conversations(backend)
    expected = [greedy(backend, *parts) for parts in asked]
    assert max(abs(one[1] - other[1]) for one, other in zip(*expected[:2], strict=True)) > 2 * ROUNDING
    talks = Conversations(backend)
    check([talks.ask(parts)[0] for parts in asked], expected)
    n_encoded = talks.n_encoded
    check(talks.ask(*asked), expected)
    assert talks.n_encoded == n_encoded
    # What was kept in cells leaves them, and comes back.
    talks.ask(*[(f"{number} {LONG}",) for number in range(8)])
    check(talks.ask(*reversed(asked)), expected[::-1])
    assert talks.n_encoded == n_encoded
    last = talks.usage[len(talks.answers) - 1]
    assert last.n_cached > 0
    talks.engine.cache.check_integrity()


def test_a_turn_after_a_picture_computes_only_what_is_new(backend: LlamaBackend, pair: Pair, tmp_path: Path):
    picture = media_file(tmp_path, pair)
    Conversations(backend)
    expected = greedy(backend, LONG, picture, " what is it then")
    talks = Conversations(backend)
    talks.ask((LONG, picture, " what is it"))
    talks.ask((LONG, picture, " what is it then"))
    first, second = talks.usage[0], talks.usage[1]
    n_chunk_end = n_tokens(backend.projector.tokenize(prompt(LONG, picture))) if backend.projector else 0
    assert first.n_cached == 0
    if backend.cuts_states:
        assert second.n_cached >= n_chunk_end
    check([talks.answers[1]], [expected])


def test_a_picture_that_the_projector_cannot_scale_is_named_by_its_size(tmp_path: Path):
    pair = make_pair(tmp_path, "idefics3")
    with opened(pair) as backend:
        assert backend.projector is not None
        parts = backend.projector.tokenize(prompt(media_file(tmp_path, pair, width=1, height=16_384)))
        (chunk,) = (part for part in parts if isinstance(part, MediaChunk))
        with pytest.raises(BadRequest, match=r"a picture of 1 x 16384 pixels: .* cannot take this"):
            encoded(backend, chunk)
