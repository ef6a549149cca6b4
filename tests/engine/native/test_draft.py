"""A real draft model: what it says beside the model that it drafts for, and which files it cannot be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.native.llama import LlamaBackend
from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.speculate.draft_model import DraftModel, DraftModels
from localrun.errors import BadModelFile
from localrun.wire import Sampling
from tests.engine.conftest import compute, open_tiny
from tests.engine.speculate.fake_draft import check_books
from tests.support.synthesis.synthesize import synthesize, write_model
from tests.support.synthesis.synthetic_tokenizer import Vocabulary, make_vocabulary
from tests.support.synthesis.tensor_plan import SHAPES, plan_tensors

N_TOKENS = 60
PATIENCE_S = 60.0
# Batches of other sizes round otherwise, and random weights have close calls.
LEAST_ACCEPTED = 0.9


def prompt(number: int, length: int = 40) -> list[int]:
    return [300 + (number * 131 + at * 7) % 900 for at in range(length)]


@pytest.fixture(scope="module")
def target(tiny_gguf: Path) -> Iterator[LlamaBackend]:
    backend = open_tiny(tiny_gguf, n_cells=1024, n_seqs=4, n_batch=192, may_split=True)
    yield backend
    backend.close()


@pytest.fixture
def backend(target: LlamaBackend) -> LlamaBackend:
    assert target.worker is not None
    for seq in range(target.n_seqs + target.worker.n_seqs):
        target.seq_remove(seq, 0)
    return target


@pytest.fixture(scope="module")
def synthesized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Files of the small shapes, by name; perhaps with another vocabulary."""
    folder = tmp_path_factory.mktemp("drafts")

    def path_of(name: str, vocabulary: Vocabulary | None = None) -> Path:
        path = folder / f"{name}{'' if vocabulary is None else hash(tuple(vocabulary.tokens))}.gguf"
        if not path.exists() and vocabulary is None:
            synthesize(name, "F16", path)
        elif vocabulary is not None:
            shape = replace(SHAPES[name], n_vocab=len(vocabulary.tokens))
            write_model(path, shape, list(plan_tensors(shape, "F16")), "F16", vocabulary, seed=1)
        return path

    return path_of


def drafting(backend: LlamaBackend, path: Path) -> DraftModel:
    return DraftModel(backend.open_draft(str(path)), time.perf_counter, least_chance=0.0)


def request(backend: LlamaBackend, seq: int, tokens: list[int]) -> Request:
    sampler = backend.sampler(Sampling(temperature=0), ignore_eos=True)
    return Request(seq, list(tokens), len(tokens), N_TOKENS, sampler, TextStream(()), seq=seq)


class Answers:
    """Greedy answers of a model, some of whose steps are drafted first; what was drafted and accepted is counted."""

    def __init__(self, backend: LlamaBackend, drafts: DraftModel, *requests: Request) -> None:
        self.backend, self.drafts, self.requests = backend, drafts, requests
        self.n_drafted = self.n_accepted = 0
        for one in requests:
            assert one.seq is not None
            one.tokens.append(int(compute(backend, one.seq, one.tokens).argmax()))

    def go_on(self, n_tokens: int, n_most: int = 4) -> None:
        for _ in range(n_tokens):
            proposed = self.drafts.propose([(one, n_most) for one in self.requests])
            for one, draft in zip(self.requests, proposed, strict=True):
                self.n_drafted += len(draft)
                self._verify(one, draft)

    def _verify(self, one: Request, draft: list[int]) -> None:
        """As the model says it without drafts, one row at a time."""
        assert one.seq is not None
        for guess in [*draft, None]:
            logits = compute(self.backend, one.seq, one.tokens[-1:], start=len(one.tokens) - 1)
            one.tokens.append(int(logits.argmax()))
            if one.tokens[-1] != guess:
                return
            self.n_accepted += 1


def test_a_model_drafts_for_itself_what_it_says(backend: LlamaBackend, tiny_gguf: Path):
    drafts = drafting(backend, tiny_gguf)
    answers = Answers(backend, drafts, *(request(backend, seq, prompt(seq)) for seq in range(3)))
    answers.go_on(20)
    assert answers.n_drafted > 200
    assert answers.n_accepted >= LEAST_ACCEPTED * answers.n_drafted
    check_books(drafts)
    drafts.close()


def test_after_wrong_drafts_it_knows_what_a_fresh_one_knows(
    backend: LlamaBackend, tiny_gguf: Path, synthesized: Callable[..., Path]
):
    """The draft model is a stranger to the answer, so nearly everything is cut off; a fresh sequence says the same."""
    drafts = drafting(backend, synthesized("tiny-gemma3"))
    answers = Answers(backend, drafts, *(request(backend, seq, prompt(seq)) for seq in range(2)))
    answers.go_on(90)  # well beyond the window of 64 tokens
    assert answers.n_accepted < answers.n_drafted / 2
    fresh = drafting(backend, synthesized("tiny-gemma3"))
    wanted = [(one, 1) for one in answers.requests]
    known, anew = drafts.propose(wanted), fresh.propose(wanted)
    while not all(anew):
        anew = fresh.propose(wanted)
    assert known == anew
    drafts.close()
    fresh.close()


def test_it_drafts_while_the_background_computes_a_prompt(backend: LlamaBackend, tiny_gguf: Path):
    drafts = drafting(backend, tiny_gguf)
    answers = Answers(backend, drafts, request(backend, 1, prompt(1)))
    assert backend.worker is not None
    worker = backend.worker
    long = prompt(2, 180)
    worker.batch.token[: len(long)] = long
    worker.batch.pos[: len(long)] = range(len(long))
    worker.batch.seq[: len(long)] = 0
    worker.batch.wants_logits[: len(long)] = 0
    worker.start(len(long))
    answers.go_on(8)
    while not worker.is_over():
        time.sleep(0.001)
    worker.finish()
    assert answers.n_accepted >= LEAST_ACCEPTED * answers.n_drafted
    assert backend.seq_copy(backend.n_seqs, 2)
    beside = compute(backend, 2, long[-1:], start=len(long))
    backend.seq_remove(0, 0)
    compute(backend, 0, long)
    np.testing.assert_allclose(beside, compute(backend, 0, long[-1:], start=len(long)), atol=2e-2)
    drafts.close()


def test_it_has_as_much_room_for_a_request_as_a_stream(backend: LlamaBackend, tiny_gguf: Path):
    context = backend.open_draft(str(tiny_gguf))
    drafts = DraftModel(context, time.perf_counter, least_chance=0.0)
    one = request(backend, 0, prompt(0))
    before = drafts.propose([(one, 3)])
    assert context.n_ctx == 256
    backend.rebuild()
    assert drafts.propose([(one, 3)]) == before
    drafts.close()


def test_likeliest_gives_the_probability_of_the_whole_vocabulary(backend: LlamaBackend, tiny_gguf: Path):
    context = backend.open_draft(str(tiny_gguf))
    context.batch.token[0], context.batch.pos[0], context.batch.seq[0], context.batch.wants_logits[0] = 300, 0, 0, 1
    with context.alone():
        context.decode(1)
    token, probability = context.likeliest(0)
    logits = compute(backend, 0, [300]).astype(np.float64)
    assert token == logits.argmax()
    assert probability == pytest.approx(np.exp(logits[token]) / np.exp(logits).sum(), rel=1e-3)
    context.close()


# --- what cannot draft ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-lfm2"])
def test_a_model_whose_memory_cannot_be_cut_cannot_draft(
    backend: LlamaBackend, synthesized: Callable[..., Path], name: str
):
    with pytest.raises(BadModelFile, match=f"{name}.gguf cannot draft for this model: it has recurrent layers, which"):
        backend.open_draft(str(synthesized(name)))


def test_a_model_of_another_vocabulary_cannot_draft(backend: LlamaBackend, synthesized: Callable[..., Path]):
    with pytest.raises(BadModelFile, match="its vocabulary has 2304 tokens instead of 2048; choose another"):
        backend.open_draft(str(synthesized("tiny", make_vocabulary(2304))))


def test_a_vocabulary_that_is_padded_otherwise_is_the_same(backend: LlamaBackend, synthesized: Callable[..., Path]):
    vocabulary = make_vocabulary(2048)
    padding = [f"padding {number}" for number in range(64)]
    padded = Vocabulary([*vocabulary.tokens, *padding], [*vocabulary.token_types, *[1] * 64], vocabulary.merges)
    context = backend.open_draft(str(synthesized("tiny", padded)))
    assert context.n_vocab == 2048
    context.close()


def test_a_single_other_token_is_found(backend: LlamaBackend, synthesized: Callable[..., Path]):
    vocabulary = make_vocabulary(2048)
    tokens = list(vocabulary.tokens)
    tokens[-1] = "another"
    with pytest.raises(BadModelFile, match="its token 2047 is another one"):
        backend.open_draft(str(synthesized("tiny", vocabulary._replace(tokens=tokens))))


def test_a_file_that_is_no_model_cannot_draft(backend: LlamaBackend, tmp_path: Path):
    with pytest.raises(BadModelFile, match="cannot load"):
        backend.open_draft(str(tmp_path / "nothing.gguf"))


def test_loading_ends_when_nobody_wants_it(backend: LlamaBackend, tiny_gguf: Path):
    with pytest.raises(BadModelFile, match="cannot load"):
        backend.open_draft(str(tiny_gguf), lambda: False)


def test_it_is_loaded_beside_steps(backend: LlamaBackend, tiny_gguf: Path):
    may_load = threading.Event()

    def open_draft(path: str, is_wanted: Callable[[], bool]) -> DraftModel:
        may_load.wait(PATIENCE_S)
        return DraftModel(backend.open_draft(path, is_wanted), time.perf_counter, least_chance=0.0)

    models = DraftModels(open_draft)
    one = request(backend, 0, prompt(0))
    one.draft_model_path = str(tiny_gguf)
    one.tokens.append(int(compute(backend, 0, one.tokens).argmax()))
    deadline_s = time.monotonic() + PATIENCE_S
    while not models.propose([(one, 2)])[0]:
        one.tokens.append(int(compute(backend, 0, one.tokens[-1:], start=len(one.tokens) - 1).argmax()))
        may_load.set()
        assert time.monotonic() < deadline_s
        if len(one.tokens) > 200:
            backend.seq_remove(0, 40)
            del one.tokens[41:]
    models.close()
