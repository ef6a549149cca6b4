"""Streams that share native memory: what is read of a row is that row's own, whoever else is in the batch.

At each step other sequences have rows, other numbers of them, in an order of their own. Each is computed once more
alone, in a context where there is nobody else; a row of another stream would differ by about its whole spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest

from localrun.engine.backend import BASE, AdapterSet
from localrun.engine.native.embedder import LlamaEmbedder
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Pooling
from tests.depth import DEPTH
from tests.engine.native.test_llama_adapters import loaded, set_of
from tests.lora_file import write_lora, write_vector
from tests.models.synthesize_embedding import synthesize_embedding
from tests.support.synthesis.synthesize import synthesize

N_SEQS, N_CELLS, N_BATCH = 4, 1024, 64
N_STEPS = 40 * DEPTH
# Of the spread of a row's logits; batches of other shapes round otherwise, and recurrent layers add up what they round.
ROUNDING = 0.1


def opened(path: Path, *, n_seqs: int, split: bool = False, on_device: bool = False) -> LlamaBackend:
    return LlamaBackend(
        str(path), n_cells=N_CELLS, n_seqs=n_seqs, n_batch=N_BATCH, n_threads=1, n_gpu_layers=0, kv_type="f16",
        may_split=split, samples_on_device=on_device,
    )  # fmt: skip


@dataclass
class Trace:
    """Rows that are computed among others in `shared`, and by themselves in `alone`."""

    shared: LlamaBackend
    alone: LlamaBackend
    chance: Random
    texts: list[list[int]] = field(default_factory=lambda: [[] for _ in range(N_SEQS)])

    def step(self, seqs: list[int]) -> None:
        """Some rows of each of these sequences, whose turns are mixed; all have logits."""
        rows = [seq for seq in seqs for _ in range(self.chance.choice((1, 1, 1, 2, 5)))]
        self.chance.shuffle(rows)
        batch = self.shared.batch
        for row, seq in enumerate(rows):
            token = 300 + self.chance.randrange(400)
            batch.token[row], batch.seq[row], batch.pos[row] = token, seq, len(self.texts[seq])
            batch.wants_logits[row] = 1
            self.texts[seq].append(token)
        self.shared.decode(len(rows))
        got = [self.shared.logits(row).copy() for row in range(len(rows))]
        for seq in seqs:
            for row, expected in zip(
                np.flatnonzero(np.equal(rows, seq)), self.by_itself(seq, rows.count(seq)), strict=True
            ):
                apart = np.sqrt(np.mean((got[row] - expected) ** 2))
                assert apart <= ROUNDING * expected.std(), f"row {row}, of sequence {seq}, in {rows}"

    def by_itself(self, seq: int, n_rows: int) -> list[np.ndarray]:
        """The logits of the last rows of a sequence, computed anew from its beginning."""
        text, batch = self.texts[seq], self.alone.batch
        assert self.alone.seq_remove(0, 0)
        rows: list[np.ndarray] = []
        for start in range(0, len(text), N_BATCH):
            part = text[start : start + N_BATCH]
            batch.token[: len(part)], batch.seq[: len(part)] = part, 0
            batch.pos[: len(part)] = range(start, start + len(part))
            batch.wants_logits[: len(part)] = 1
            self.alone.decode(len(part))
            rows += [self.alone.logits(row).copy() for row in range(len(part))]
        return rows[-n_rows:]

    def forget_long(self) -> None:
        for seq in range(N_SEQS):
            if len(self.texts[seq]) > 120:
                self.texts[seq] = []
                assert self.shared.seq_remove(seq, 0)


@pytest.mark.parametrize(
    ("shape", "split"),
    [("tiny", True), ("tiny", False), ("tiny-gemma3", False), ("tiny-mamba", False), ("tiny-lfm2", False)],
)
def test_logits_are_their_row_s_wherever_llama_cpp_has_put_it(shape: str, split: bool, tmp_path: Path) -> None:
    """Streams of cells, windows and states are computed in several graphs, in another order than that of the batch."""
    path = tmp_path / "model.gguf"
    synthesize(shape, "F16", path)
    shared, alone = opened(path, n_seqs=N_SEQS, split=split), opened(path, n_seqs=1)
    trace = Trace(shared, alone, Random(shape))
    for _ in range(N_STEPS):
        trace.step(trace.chance.sample(range(N_SEQS), trace.chance.randint(1, N_SEQS)))
        trace.forget_long()
    shared.close()
    alone.close()


def test_a_view_of_logits_is_as_long_as_the_decode_and_no_longer(tiny_gguf: Path) -> None:
    """So whoever keeps a row copies it before the next decode, as the trace above does."""
    backend = opened(tiny_gguf, n_seqs=1)
    batch = backend.batch
    views = []
    for at, token in enumerate((300, 301)):
        batch.token[0], batch.seq[0], batch.pos[0], batch.wants_logits[0] = token, 0, at, 1
        backend.decode(1)
        views.append(backend.logits(0))
    assert np.shares_memory(*views)
    backend.close()


def test_every_stream_has_its_own_adapters_after_any_other_s(tiny_gguf: Path, tmp_path: Path) -> None:
    """A batch has one set; sets change from batch to batch, and with them the streams."""
    files = {
        "a": write_lora(tiny_gguf, tmp_path / "a.gguf", seed=1),
        "b": write_lora(tiny_gguf, tmp_path / "b.gguf", seed=2),
        "v": write_vector(tiny_gguf, tmp_path / "v.gguf", seed=3),
    }
    shared, alone = opened(tiny_gguf, n_seqs=N_SEQS, split=True), opened(tiny_gguf, n_seqs=1)
    which: list[dict[str, float]] = [{}, {"a": 1}, {"a": 1, "v": 1}, {"b": -1}]
    sets: list[AdapterSet] = [set_of(files, each) for each in which]
    for backend in (shared, alone):
        for each in sets:
            loaded(backend, each)
    chance = Random(3)
    trace = Trace(shared, alone, chance)
    for _ in range(N_STEPS):
        seq = chance.randrange(N_SEQS)
        for backend in (shared, alone):
            backend.use(sets[seq])
            backend.batch.adapter_hash = sets[seq].hash
        trace.step([seq])
        trace.forget_long()
    for backend in (shared, alone):
        backend.use(BASE)
        backend.close()


def test_a_draft_model_drafts_for_each_stream_by_its_own_text(tiny_gguf: Path) -> None:
    """It has a context of its own beside the model's, with the same sequences; other streams want drafts each time."""
    target, alone = opened(tiny_gguf, n_seqs=N_SEQS), opened(tiny_gguf, n_seqs=1)
    draft = target.open_draft(str(tiny_gguf))
    chance = Random(5)
    trace = Trace(target, alone, chance)
    for _ in range(N_STEPS):
        seqs = chance.sample(range(N_SEQS), chance.randint(1, N_SEQS))
        for row, seq in enumerate(seqs):
            token = 300 + chance.randrange(400)
            draft.batch.token[row], draft.batch.seq[row] = token, seq
            draft.batch.pos[row], draft.batch.wants_logits[row] = len(trace.texts[seq]), 1
            trace.texts[seq].append(token)
        with draft.alone():
            draft.decode(len(seqs))
            said = [draft.likeliest(row)[0] for row in range(len(seqs))]
        for seq, token in zip(seqs, said, strict=True):
            [expected] = trace.by_itself(seq, 1)
            assert expected.max() - expected[token] <= ROUNDING * expected.std(), f"sequence {seq} of {seqs}"
    draft.close()
    target.close()
    alone.close()


@pytest.fixture(params=["tiny-bert", "tiny-qwen3-embedding", "tiny-gemma3", "tiny-mamba", "tiny-lfm2"])
def embedder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LlamaEmbedder]]:
    path = tmp_path / "embedding.gguf"
    is_made_for_it = request.param in ("tiny-bert", "tiny-qwen3-embedding")
    (synthesize_embedding if is_made_for_it else lambda shape, out: synthesize(shape, "F16", out))(request.param, path)
    pooling = Pooling.LAST if request.param == "tiny-qwen3-embedding" else Pooling.MEAN
    made: list[LlamaEmbedder] = []

    def open_one() -> LlamaEmbedder:
        made.append(LlamaEmbedder(str(path), pooling=pooling, n_ctx=512, n_rows=256, n_threads=1))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


def test_a_vector_is_its_input_s_whichever_inputs_share_the_step(embedder: Callable[[], LlamaEmbedder]) -> None:
    shared, alone = embedder(), embedder()
    chance = Random(7)
    texts = [[chance.randrange(100, 200) for _ in range(chance.randint(1, 30))] for _ in range(12)]
    expected = []
    for text in texts:
        _lay(alone, {0: text})
        expected.append(alone.vector(0))
        alone.forget(0)
    for number, one in enumerate(expected):
        assert all(_distance(one, other) > 0.001 for other in expected[:number]), "a mix-up could hide"
    for _ in range(N_STEPS):
        chosen = chance.sample(range(len(texts)), chance.randint(1, min(6, shared.n_seqs)))
        seqs = dict(zip(chance.sample(range(shared.n_seqs), len(chosen)), chosen, strict=True))
        _lay(shared, {seq: texts[which] for seq, which in seqs.items()})
        for seq, which in seqs.items():
            assert _distance(shared.vector(seq), expected[which]) < 2e-4, f"input {which}, sequence {seq} of {seqs}"
            shared.forget(seq)


def _lay(embedder: LlamaEmbedder, texts: dict[int, list[int]]) -> None:
    at, batch = 0, embedder.batch
    for seq, text in texts.items():
        part = slice(at, at + len(text))
        batch.token[part], batch.seq[part], batch.pos[part] = text, seq, range(len(text))
        batch.wants_logits[part] = 1
        at = part.stop
    embedder.compute(at)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(1 - one @ other / np.linalg.norm(one) / np.linalg.norm(other))
