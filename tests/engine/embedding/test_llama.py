"""Vectors and scores of llama.cpp in batches, against one sequence after the other by bare calls of the library."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as native
import numpy as np
import pytest

from localrun.engine.embedding.engine import EmbeddingEngine
from localrun.engine.native.embedder import LlamaEmbedder
from localrun.wire import Embed, Pooling
from tests.models.synthesize_embedding import PAIR_TEMPLATE, synthesize_embedding
from tests.support.synthesis.synthesize import synthesize

TEXTS = (
    "hello", "the cat and the dog went home", "What is the time? 12:30!", "größe ☃ 日本語 😀", "a " * 90,
    "the river and the sea " * 15, "x", "say yes or no\n\tplease  now",
)  # fmt: skip
# One minus the cosine. Rounding alone gives 1e-6 for short texts, 5e-5 for a long one in pieces; a mix-up about 1.
MOST_DISTANCE = 2e-4

KINDS = {
    "tiny-bert": Pooling.MEAN,
    "tiny-bert-reranker": Pooling.RANK,
    "tiny-qwen3-embedding": Pooling.LAST,
    "tiny-qwen3-reranker": Pooling.RANK,
}


# Chat models that keep a window or a state of a sequence instead of everything.
MEMORY_KINDS = ("tiny-gemma3", "tiny-mamba", "tiny-qwen35", "tiny-lfm2")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedding")
    for kind in KINDS:
        synthesize_embedding(kind, made / f"{kind}.gguf")
    synthesize("tiny", "F16", made / "chat.gguf")
    for shape in MEMORY_KINDS:
        synthesize(shape, "F16", made / f"{shape}.gguf")
    return made


# What is computed of it are no numbers, in files that `spoil` has changed.
NAN_TOKEN = 90


class Reference:
    """One context, one sequence, one micro-batch: the plainest way to ask llama.cpp."""

    def __init__(self, path: Path, pooling: Pooling) -> None:
        native.llama_backend_init()
        self.model = native.llama_model_load_from_file(str(path).encode(), native.llama_model_default_params())
        params = native.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 2048
        params.embeddings = True
        params.n_threads = params.n_threads_batch = 1
        params.pooling_type = {
            Pooling.MEAN: native.LLAMA_POOLING_TYPE_MEAN,
            Pooling.CLS: native.LLAMA_POOLING_TYPE_CLS,
            Pooling.LAST: native.LLAMA_POOLING_TYPE_LAST,
            Pooling.RANK: native.LLAMA_POOLING_TYPE_RANK,
        }[pooling]
        self.context = native.llama_init_from_model(self.model, params)
        is_reranker = pooling is Pooling.RANK
        self.n_out = (native.llama_model_n_cls_out if is_reranker else native.llama_model_n_embd_out)(self.model)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (native.llama_token * (len(data) + 16))()
        vocab = native.llama_model_get_vocab(self.model)
        count = native.llama_tokenize(vocab, data, len(data), buffer, len(buffer), True, True)
        return list(buffer[:count])

    def vector(self, tokens: list[int]) -> np.ndarray:
        memory = native.llama_get_memory(self.context)
        if memory:
            native.llama_memory_clear(memory, True)
        array = (native.llama_token * len(tokens))(*tokens)
        assert native.llama_decode(self.context, native.llama_batch_get_one(array, len(tokens))) == 0
        pointer = native.llama_get_embeddings_seq(self.context, 0)
        return np.array((ctypes.c_float * self.n_out).from_address(ctypes.addressof(pointer.contents)))

    def close(self) -> None:
        native.llama_free(self.context)
        native.llama_model_free(self.model)


class Opened:
    """An engine over a model, and the reference beside it."""

    def __init__(self, path: Path, pooling: Pooling, *, n_rows: int = 256) -> None:
        self.embedder = LlamaEmbedder(str(path), pooling=pooling, n_ctx=2048, n_rows=n_rows, n_threads=1)
        self.reference = Reference(path, pooling)
        self._ids = iter(range(1, 1000))

    def run(self, inputs: tuple[str | tuple[int, ...], ...], *, query: str | None = None, truncate: bool = False):
        engine = EmbeddingEngine(self.embedder, max_queue=4, clock=lambda: 0.0)
        engine.submit(Embed(id=next(self._ids), inputs=inputs, query=query, truncate=truncate))
        vectors = {}
        while not engine.is_idle:
            step = engine.step()
            for delta in step.deltas if step else ():
                assert delta.error_message is None, delta.error_message
                vectors |= {vector.index: vector for vector in delta.vectors or ()}
        return [np.frombuffer(vectors[index].values, "<f4") for index in range(len(inputs))]

    def close(self) -> None:
        self.reference.close()
        self.embedder.close()


@pytest.fixture
def opened(folder: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    name, pooling, *n_rows = request.param
    made = Opened(folder / f"{name}.gguf", pooling, **({"n_rows": n_rows[0]} if n_rows else {}))
    yield made
    made.close()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b))


EMBEDDERS = [
    ("tiny-bert", Pooling.MEAN),
    ("tiny-qwen3-embedding", Pooling.LAST),
    # A file may ask for a mean of tokens that only look back; over several steps it is a mean of means.
    ("tiny-qwen3-embedding", Pooling.MEAN, 70),
    ("tiny-bert", Pooling.CLS),
    ("tiny-qwen3-embedding", Pooling.CLS, 70),
    ("chat", Pooling.LAST),
    ("chat", Pooling.MEAN, 64),
    *((shape, Pooling.LAST, 64) for shape in MEMORY_KINDS),
]


@pytest.mark.parametrize("opened", EMBEDDERS, indirect=True)
def test_a_batch_gives_what_each_input_gives_alone(opened: Opened):
    for text, found in zip(TEXTS, opened.run(TEXTS), strict=True):
        tokens = opened.reference.tokenize(text)
        assert distance(found, opened.reference.vector(tokens)) < MOST_DISTANCE, text
        assert abs(np.linalg.norm(found) - 1) < 1e-6
    assert opened.run(TEXTS[:1])[0] == pytest.approx(opened.run(TEXTS)[0], abs=2e-3)


def spoil(path: Path, out: Path) -> Path:
    """The model with an embedding of `NAN_TOKEN` that is no number."""
    shutil.copy(path, out)
    reader = gguf.GGUFReader(out, "r+")
    next(one for one in reader.tensors if one.name == "token_embd.weight").data[NAN_TOKEN] = np.nan
    reader.data.flush()
    return out


@pytest.mark.parametrize(
    ("name", "pooling"),
    [("tiny-bert", Pooling.MEAN), *((shape, Pooling.LAST) for shape in ("tiny-qwen3-embedding", *MEMORY_KINDS))],
)
def test_others_have_their_numbers_beside_and_after_who_has_none(
    name: str, pooling: Pooling, folder: Path, tmp_path: Path
):
    opened = Opened(spoil(folder / f"{name}.gguf", tmp_path / "spoiled.gguf"), pooling, n_rows=64)
    others = [tuple(20 + at * step % 60 for at in range(90)) for step in (1, 7)]
    bad = (*range(20, 60), NAN_TOKEN, *range(20, 60))
    expected = [opened.reference.vector(list(tokens)) for tokens in others]
    engine = EmbeddingEngine(opened.embedder, max_queue=8, clock=lambda: 0.0)
    try:
        for first in (0, 10):
            finals = {}
            for number, tokens in enumerate((others[0], bad, others[1])):
                engine.submit(Embed(id=first + number, inputs=(tokens,)))
            while not engine.is_idle:
                step = engine.step()
                finals |= {delta.id: delta for delta in step.deltas if delta.finish is not None} if step else {}
            assert "NaN" in (finals[first + 1].error_message or "")
            for number, vector in zip((first, first + 2), expected, strict=True):
                found = np.frombuffer(finals[number].vectors[0].values, "<f4")
                assert distance(found, vector) < MOST_DISTANCE
    finally:
        opened.close()


@pytest.mark.parametrize("opened", EMBEDDERS, indirect=True)
def test_tokens_are_those_of_the_library_with_its_special_ones(opened: Opened):
    before, after = opened.embedder.affixes
    for text in TEXTS:
        tokens = [*before, *opened.embedder.tokenize(text, parse_special=True), *after]
        assert tokens == opened.reference.tokenize(text)
        assert distance(*opened.run((text, tuple(tokens)))) < MOST_DISTANCE


@pytest.mark.parametrize("opened", [("tiny-qwen3-embedding", Pooling.LAST, 64)], indirect=True)
def test_a_long_input_is_computed_in_pieces_among_others(opened: Opened):
    long = "the sun and the moon and the stars " * 60
    tokens = opened.reference.tokenize(long)
    assert len(tokens) > 10 * opened.embedder.n_rows
    found = opened.run(("short", long, "tail", long[:-40]))
    assert distance(found[1], opened.reference.vector(tokens)) < MOST_DISTANCE
    assert distance(found[2], opened.reference.vector(opened.reference.tokenize("tail"))) < MOST_DISTANCE


@pytest.mark.parametrize("opened", [("tiny-bert", Pooling.MEAN, 32)], indirect=True)
def test_an_encoder_reads_its_longest_input_at_once_and_cuts_longer_ones(opened: Opened):
    assert not opened.embedder.can_split
    assert opened.embedder.n_ctx == 128
    found = opened.run(("the cat " * 100, "hello"), truncate=True)
    whole = opened.reference.tokenize("the cat " * 100)
    assert distance(found[0], opened.reference.vector([*whole[:127], whole[-1]])) < MOST_DISTANCE
    assert distance(found[1], opened.reference.vector(opened.reference.tokenize("hello"))) < MOST_DISTANCE


@pytest.mark.parametrize("opened", [("tiny-bert-reranker", Pooling.RANK)], indirect=True)
def test_scores_of_an_encoder_are_those_of_the_pair_with_its_separators(opened: Opened):
    cls, sep = opened.embedder.affixes[0][0], opened.embedder.affixes[1][0]
    bare = [opened.reference.tokenize(text)[1:-1] for text in ("where is it?", *TEXTS[:4])]
    for document, found in zip(bare[1:], opened.run(TEXTS[:4], query="where is it?"), strict=True):
        # llama.cpp's server puts no separator behind the document.
        expected = opened.reference.vector([cls, *bare[0], sep, *document])
        assert found[0] == pytest.approx(expected[0], abs=1e-3)


@pytest.mark.parametrize("opened", [("tiny-qwen3-reranker", Pooling.RANK)], indirect=True)
def test_scores_of_a_decoder_are_those_of_its_template(opened: Opened):
    found = opened.run(TEXTS, query="where is it?")
    for text, scores in zip(TEXTS, found, strict=True):
        pair = PAIR_TEMPLATE.replace("{query}", "where is it?").replace("{document}", text)
        tokens = opened.reference.tokenize(pair)[:-1]  # the server adds nothing behind a template
        assert scores == pytest.approx(opened.reference.vector(tokens), abs=1e-3)
        assert scores.sum() == pytest.approx(1, abs=1e-4)
    assert len({float(scores[0]) for scores in found}) == len(TEXTS)


@pytest.mark.parametrize("opened", [("tiny-bert", Pooling.MEAN)], indirect=True)
def test_integers_are_checked_before_native_code_sees_them(opened: Opened):
    embedder = opened.embedder
    for array, value in ((embedder.batch.token, 10**6), (embedder.batch.pos, 128), (embedder.batch.seq, 64)):
        before, array[0] = array[0], value
        with pytest.raises(ValueError, match="is not within"):
            embedder.compute(1)
        array[0] = before
    with pytest.raises(ValueError, match="rows in a batch"):
        embedder.compute(embedder.batch.capacity + 1)
    with pytest.raises(ValueError, match="is not below"):
        embedder.forget(64)
