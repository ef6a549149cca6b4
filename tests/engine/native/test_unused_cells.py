"""Cells that nobody has used take no memory, and compute what zeroed ones do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from localrun.engine.native import llama
from localrun.engine.native.context import LlamaContext
from localrun.engine.native.library import log_callback, native
from localrun.engine.native.llama import LlamaBackend
from tests.engine.conftest import compute, open_tiny

N_CELLS = 1 << 16
PROMPT = [300 + at * 7 % 900 for at in range(60)]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")


def resident_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not say")


def opened(path: Path, *, may_split: bool) -> LlamaBackend:
    return open_tiny(path, n_cells=N_CELLS, n_seqs=4, may_split=may_split)


def answers(backend: LlamaBackend) -> list[np.ndarray]:
    """Of two sequences, the second of which comes back from a copy of the first."""
    first = compute(backend, 0, PROMPT)
    (data,) = backend.state_slices(0, [(0, len(PROMPT))])
    assert backend.state_set(1, backend.state_join(1, [(data, 0, 0, len(PROMPT))]))
    return [first, compute(backend, 1, [5], start=len(PROMPT))]


@pytest.mark.parametrize("may_split", [False, True])
def test_an_empty_context_takes_no_memory_for_its_cells_and_answers_the_same(
    tiny_gguf: Path, may_split: bool, monkeypatch: pytest.MonkeyPatch
):
    given: list[int] = []
    give_back = LlamaContext.give_back_cells

    def noted(context: LlamaContext) -> int:
        before = resident_bytes()
        given.append(give_back(context))
        assert before - resident_bytes() > 0.8 * given[-1] > 0
        return given[-1]

    monkeypatch.setattr(LlamaContext, "give_back_cells", noted)
    backend = opened(tiny_gguf, may_split=may_split)
    kv_bytes = N_CELLS * backend.state_token_bytes
    assert len(given) == 1 + may_split, "of the background, too"
    assert all(size > 0.9 * kv_bytes for size in given)
    spared = answers(backend)
    backend.close()
    monkeypatch.setattr(LlamaContext, "give_back_cells", lambda context: 0)
    backend = opened(tiny_gguf, may_split=may_split)
    for one, other in zip(spared, answers(backend), strict=True):
        np.testing.assert_array_equal(one, other)
    backend.close()


@pytest.mark.parametrize("may_split", [False, True])
def test_graphs_are_laid_out_as_before_when_cells_are_given_back(
    tiny_gguf: Path, may_split: bool, monkeypatch: pytest.MonkeyPatch
):
    """The last graph that is reserved decides where tensors lie. With another deep prompts took a quarter longer."""
    reserved: list[bytes] = []
    last_before: list[bytes] = []

    @native.llama_log_callback
    def note(level: int, text: bytes, data: object) -> None:
        if b"reserving a graph" in text:
            reserved.append(text)

    give_back = LlamaContext.give_back_cells

    def noted(context: LlamaContext) -> int:
        last_before.append(reserved[-1])
        return give_back(context)

    monkeypatch.setattr(LlamaContext, "give_back_cells", noted)
    monkeypatch.setattr(llama, "log_callback", note)
    backend = opened(tiny_gguf, may_split=may_split)
    backend.close()
    native.llama_log_set(log_callback, None)
    assert len(last_before) == 1 + may_split
    assert reserved[-1] == last_before[-1]
    assert b"n_tokens =   64" in reserved[-1]
