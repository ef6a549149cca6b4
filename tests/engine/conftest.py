"""A synthesized model for the tests of this folder, one real backend over it per module, and bare calls of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="session", autouse=True)
def _right_kernels(sound_kernels: None) -> None:
    """Models are opened here without a daemon that knows which kernels to do without."""


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthesized") / "tiny.gguf"
    synthesize("tiny", "F16", path)
    return path


def open_tiny(
    path: Path, *, n_cells: int = 512, n_seqs: int = 8, n_batch: int = 64, may_split: bool = False,
    samples_on_device: bool = False,
) -> LlamaBackend:  # fmt: skip
    """One pool, where cells are shared, unless `may_split`."""
    return LlamaBackend(
        str(path), n_cells=n_cells, n_seqs=n_seqs, n_batch=n_batch, n_threads=1, n_gpu_layers=0, kv_type="f16",
        may_split=may_split, samples_on_device=samples_on_device,
    )  # fmt: skip


def compute(backend: LlamaBackend, seq: int, tokens: list[int], *, start: int = 0) -> np.ndarray:
    """The logits after `tokens` at positions `start`.. of a sequence."""
    backend.turn_to(pool=seq >= backend.n_seqs)
    count, batch = len(tokens), backend.batch
    batch.token[:count] = tokens
    batch.pos[:count] = range(start, start + count)
    batch.seq[:count] = seq - batch.first_seq
    batch.wants_logits[:count] = 0
    batch.wants_logits[count - 1] = 1
    backend.decode(count)
    logits = backend.logits(count - 1).copy()
    backend.turn_to(pool=False)
    return logits


def n_held(backend: LlamaBackend, seq: int) -> int:
    """How many tokens llama.cpp itself has of a sequence."""
    context, local = backend.main, seq
    if seq >= backend.n_seqs:
        assert backend.worker is not None
        context, local = backend.worker.context, seq - backend.n_seqs
    return int(native.llama_memory_seq_pos_max(native.llama_get_memory(context.native), local)) + 1


def saved_state(backend: LlamaBackend, seq: int) -> bytearray:
    state = backend.state_get(seq, limit_bytes=1 << 30)
    assert state is not None
    return state


@pytest.fixture(scope="module")
def opened(tiny_gguf: Path) -> Iterator[LlamaBackend]:
    backend = open_tiny(tiny_gguf)
    yield backend
    backend.close()


@pytest.fixture
def backend(opened: LlamaBackend) -> LlamaBackend:
    """The module's backend with every sequence empty."""
    for seq in range(opened.n_seqs):
        opened.seq_remove(seq, 0)
    return opened
