"""One pool of threads for all contexts of a process."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from localrun.hardware.thread_choice import Threads
from tests.engine.conftest import compute, open_tiny

PROMPT = [300 + at * 7 % 900 for at in range(100)]


@pytest.fixture
def backend(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=1024, n_seqs=4, n_batch=128, may_split=True)
    yield backend
    backend.close()


def n_native_threads() -> int:
    return psutil.Process().num_threads() - threading.active_count()


def test_computing_starts_no_threads(backend: LlamaBackend):
    compute(backend, 0, PROMPT)
    before = n_native_threads()
    for seq in range(1, 4):
        compute(backend, seq, PROMPT)
    assert n_native_threads() == before


def test_every_number_of_threads_computes_the_same(backend: LlamaBackend):
    expected = compute(backend, 0, PROMPT)
    for seq, n_threads in enumerate((1, 3, 2), start=1):
        backend.set_threads(Threads(n_threads, n_threads))
        np.testing.assert_array_equal(compute(backend, seq, PROMPT), expected)


def test_one_thread_has_no_others(backend: LlamaBackend):
    backend.set_threads(Threads(1, 1))
    before = n_native_threads()
    compute(backend, 0, PROMPT)
    assert n_native_threads() == before


def test_an_old_library_without_pools_computes_as_before(
    backend: LlamaBackend, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = compute(backend, 0, PROMPT)
    monkeypatch.setattr(native._lib, "ggml_backend_dev_by_type", lambda _kind: None)
    other = open_tiny(tiny_gguf, n_cells=1024, n_seqs=4, n_batch=128, may_split=True)
    np.testing.assert_array_equal(compute(other, 0, PROMPT), expected)
    other.close()
