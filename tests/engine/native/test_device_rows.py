"""What a device leaves of a row is that row's own, whichever sequences have rows in a batch and had some before.

llama.cpp samples on the CPU here, by the path of devices. A context that leaves all logits to the host is the judge.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.backend import DecodeFailed
from localrun.engine.native import context as context_module
from localrun.engine.native import library
from localrun.engine.native.context import DEVICE_TOP_K, LlamaContext
from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from tests.depth import DEPTH
from tests.engine.conftest import open_tiny

N_SEQS = 5
SETS = [seqs for size in (2, 3, 4) for seqs in combinations(range(N_SEQS), size)]
MOST_ROWS = 8
Both = tuple[LlamaBackend, LlamaBackend]


@pytest.fixture
def both(tiny_gguf: Path) -> Iterator[Both]:
    on_device = open_tiny(tiny_gguf, n_seqs=N_SEQS, n_cells=2048, samples_on_device=True)
    on_host = open_tiny(tiny_gguf, n_seqs=N_SEQS, n_cells=2048)
    yield on_device, on_host
    on_device.close()
    on_host.close()


class Trace:
    """Batches that both contexts compute, and a comparison of every row."""

    def __init__(self, both: Both) -> None:
        self.on_device, self.on_host = both
        self._lengths = [0] * N_SEQS
        self._n_tokens = 0
        self._is_whole = [False] * N_SEQS
        self.n_compared = 0

    def expect(self, seq: int, *, is_whole: bool) -> None:
        """Whether all logits of this sequence's rows come to the host from now on."""
        self.on_device.main.expect(seq, is_whole=is_whole)
        self._is_whole[seq] = is_whole

    def step(self, rows: dict[int, int]) -> None:
        """So many rows, all with logits, of each of these sequences."""
        seqs = [seq for seq, n_rows in rows.items() for _ in range(n_rows)]
        for backend in (self.on_device, self.on_host):
            batch, lengths, n_tokens = backend.batch, list(self._lengths), self._n_tokens
            for row, seq in enumerate(seqs):
                batch.token[row], batch.seq[row], batch.pos[row] = 300 + n_tokens % 400, seq, lengths[seq]
                batch.wants_logits[row] = 1
                lengths[seq] += 1
                n_tokens += 7
            backend.decode(len(seqs))
        self._lengths, self._n_tokens = lengths, n_tokens
        for row, seq in enumerate(seqs):
            self._compare(row, f"row {row}, of sequence {seq}, in a batch of {rows}")
        for seq in range(N_SEQS):  # so that none becomes too long
            if self._lengths[seq] > 200:
                self._lengths[seq] = 0
                assert self.on_device.seq_remove(seq, 0)
                assert self.on_host.seq_remove(seq, 0)

    def _compare(self, row: int, where: str) -> None:
        logits, context = self.on_host.logits(row), self.on_device.main
        assert context.likeliest(row) == int(logits.argmax()), where
        if self._is_whole[int(self.on_device.batch.seq[row])]:
            assert np.array_equal(context.logits(row), logits), where
        else:
            ids, left = left_by_device(context, row)
            assert len(set(ids.tolist())) == DEVICE_TOP_K, where
            assert np.array_equal(left, logits[ids]), where
            assert left.min() >= np.sort(logits)[-DEVICE_TOP_K], where
        self.n_compared += 1


def left_by_device(context: LlamaContext, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids that were found for a row, and their logits."""
    count = native.llama_get_sampled_candidates_count_ith(context.native, row)
    assert count == native.llama_get_sampled_logits_count_ith(context.native, row)
    ids = np.ctypeslib.as_array(native.llama_get_sampled_candidates_ith(context.native, row), (count,))
    return ids, np.ctypeslib.as_array(native.llama_get_sampled_logits_ith(context.native, row), (count,))


@pytest.mark.parametrize("n_rows", [1, 3], ids=["a row each", "with drafts' rows"])
def test_every_set_of_sequences_after_every_other(both: Both, n_rows: int) -> None:
    """The first of two sets makes the plan of where tensors lie, and the second one finds it."""
    trace = Trace(both)
    pairs = [(one, other) for one in SETS for other in SETS if one != other]
    random.Random(n_rows).shuffle(pairs)
    for pair in pairs[: None if n_rows == 1 else 200 * DEPTH]:
        for seqs in pair:
            trace.step(dict.fromkeys(seqs, n_rows))
    assert trace.n_compared > 2000


@pytest.mark.parametrize("seed", range(2 * DEPTH))
def test_sequences_come_and_go_with_drafts_and_change_what_is_expected_of_them(both: Both, seed: int) -> None:
    chance, trace = random.Random(seed), Trace(both)
    for _ in range(150):
        if chance.random() < 0.1:
            trace.expect(chance.randrange(N_SEQS), is_whole=chance.random() < 0.5)
        seqs = chance.sample(range(N_SEQS), chance.randint(1, N_SEQS))
        has_drafts = chance.random() < 0.5
        trace.step({seq: chance.randint(1, MOST_ROWS) if has_drafts else 1 for seq in seqs})
    assert trace.n_compared > 400


def test_a_device_that_cannot_look_for_the_likeliest_leaves_all_logits(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some builds for CUDA do: then llama.cpp counts as many logits as there are tokens, and no candidates."""

    def chain() -> object:
        stages = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
        native.llama_sampler_chain_add(stages, native.llama_sampler_init_typical(0.5, 1))  # runs on no device
        return stages

    monkeypatch.setattr(context_module, "_device_chain", chain)
    on_device = open_tiny(tiny_gguf, n_seqs=3, samples_on_device=True)
    on_host = open_tiny(tiny_gguf, n_seqs=3)
    for backend in (on_device, on_host):
        for row, seq in enumerate((0, 2)):
            backend.batch.token[row], backend.batch.seq[row], backend.batch.pos[row] = 300 + row, seq, 0
            backend.batch.wants_logits[row] = 1
        backend.decode(2)
    for row in range(2):
        assert native.llama_get_sampled_candidates_count_ith(on_device.main.native, row) == 0
        assert on_device.main.problem(row) == 0
        assert on_device.main.likeliest(row) == on_host.main.likeliest(row) == int(on_host.logits(row).argmax())
    on_device.close()
    on_host.close()


def test_rows_that_a_device_did_not_compute_are_no_answer(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal notes a failed command buffer when it is waited for, and hands out what was there before."""
    backend = open_tiny(tiny_gguf, n_seqs=1, n_cells=256)
    backend.overlaps = True
    wait, failures = native.llama_synchronize, [b"ggml_metal_synchronize: error: command buffer 1 failed with status 5"]

    def synchronize(context: object) -> None:
        wait(context)
        if failures:
            library._take_log_line(4, failures.pop(), None)

    monkeypatch.setattr(native, "llama_synchronize", synchronize)
    batch = backend.batch
    batch.token[0], batch.seq[0], batch.pos[0], batch.wants_logits[0] = 300, 0, 0, 1
    with pytest.raises(DecodeFailed, match="command buffer 1 failed with status 5") as failed:
        backend.decode(1)
    assert failed.value.is_fatal
    batch.pos[0] = 1
    backend.decode(1)
    backend.close()
