"""Split streams and one pool over the same cells, on the real backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localrun.engine.cache.cache import Cache
from localrun.engine.cache.cells import COMPACT_CELLS, COMPACT_RATIO, PoolCells
from localrun.engine.cache.copies import PIECE_TOKENS
from localrun.engine.cache.tiers import Tiers
from localrun.engine.cache.tree import PrefixKey
from localrun.engine.engine import Limits
from localrun.wire import Finish, Sampling, Submit
from tests.engine.conftest import compute, open_tiny
from tests.engine.native.test_llama_cells import N_SEQS, Layouts
from tests.engine.stepped import SteppedEngine

# Attention adds up in the order of the cells: a hole alone changes logits by 0.01, another token by 5.
ROUNDING = 0.05


@pytest.mark.parametrize(("n_cells", "n_seqs"), [(1000, 8), (1024, 8), (1600, 6), (512, 2)])
def test_the_pool_has_all_cells_of_the_streams(tiny_gguf: Path, n_cells: int, n_seqs: int):
    """llama.cpp makes every stream a multiple of 256 cells long, and one pool as well."""
    backend = open_tiny(tiny_gguf, n_cells=n_cells, n_seqs=n_seqs, may_split=True)
    n_ctx = backend.n_ctx
    assert n_ctx == backend.n_cells >= n_cells
    assert backend.worker is not None
    assert backend.worker.context.n_cells == n_ctx
    backend.rebuild()
    assert backend.n_cells == backend.n_ctx == backend.worker.context.n_cells == n_ctx
    backend.close()


def test_the_longest_request_that_is_accepted_comes_to_its_end(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=1000, n_seqs=8, may_split=True)
    engine = SteppedEngine(backend, Limits(8, 8, 0.0, 1 << 24), lambda: 0.0)
    n_predict = 4
    prompt = [300 + at % 500 for at in range(backend.n_ctx - n_predict)]
    engine.submit(Submit(id=1, sampling=Sampling(temperature=0), n_predict=n_predict, ignore_eos=True), prompt)
    finishes = []
    for _ in range(400):
        if engine.is_idle:
            break
        step = engine.step()
        finishes += [delta.finish for delta in step.deltas if delta.finish] if step else []
    engine.close()
    backend.close()
    assert finishes == [Finish.LENGTH]
    assert engine.totals.preemptions <= 1, "the change to one pool alone takes it off"


def test_what_is_moved_is_where_the_books_say_and_answers_as_before(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    """A prompt that two share and the tail of each, behind a hole; `Layouts` reads where llama.cpp has them."""
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "3")
    backend = open_tiny(tiny_gguf, n_cells=2560, n_seqs=N_SEQS, n_batch=512)
    cache = Cache(backend, Tiers(0), lambda: 0.0)
    cells = cache.cells
    assert isinstance(cells, PoolCells)

    def start(tokens: list[int]) -> int:
        lease = cache.acquire(PrefixKey(tokens))
        assert lease is not None
        for at in range(lease.n_cached, len(tokens), 512):
            part = tokens[at : at + 512]
            compute(backend, lease.seq, part, start=at)
            cells.place([lease.seq] * len(part))
        cache.grow(lease.seq, len(tokens))
        return lease.seq

    below = start([5] * 1500)
    common = [300 + at % 500 for at in range(600)]
    streams = {start(tokens): tokens for tokens in (common, [*common, *range(900, 930)], [*common, *range(20, 60)])}

    def answers() -> list[np.ndarray]:
        logits = []
        for seq, tokens in streams.items():
            logits.append(compute(backend, seq, [7], start=len(tokens)))
            assert backend.seq_remove(seq, len(tokens))
        return logits

    cache.release(below, 0)
    expected = answers()
    n_moves = 0
    while cells.span > COMPACT_RATIO * cells.n_used + COMPACT_CELLS:
        span = cells.span
        cache.compact()
        assert cells.span < span
        n_moves += 1
    assert n_moves == 3, "each tail, and the end of what they share"
    assert cells.n_shared == len(common)
    cache.check_integrity()
    with Layouts() as layouts:
        for before, after in zip(expected, answers(), strict=True):
            layouts.check(cells)
            np.testing.assert_allclose(after, before, atol=ROUNDING)
    backend.close()


def test_what_is_saved_and_brought_in_pieces_behind_what_is_shared_answers_as_before(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "3")
    backend = open_tiny(tiny_gguf, n_cells=4096, n_seqs=N_SEQS, n_batch=512)
    cache = Cache(backend, Tiers(1 << 30), lambda: 0.0)
    cells = cache.cells
    assert isinstance(cells, PoolCells)
    chat = [300 + at % 500 for at in range(PIECE_TOKENS + 500)]

    def start(tokens: list[int]) -> tuple[int, int, np.ndarray]:
        lease = cache.acquire(PrefixKey(tokens))
        assert lease is not None
        while cache.restore_next():
            cache.check_integrity()
        assert cells.length(lease.seq) == lease.n_cached
        logits = np.empty(0)
        for at in range(lease.n_cached, len(tokens), 512):
            part = tokens[at : at + 512]
            logits = compute(backend, lease.seq, part, start=at)
            cells.place([lease.seq] * len(part))
        cache.grow(lease.seq, len(tokens))
        cache.check_integrity()
        return lease.seq, lease.n_cached, logits

    seq, _, expected = start(chat)
    cache.release(seq, len(chat))
    n_pieces = 0
    while cache.can_save_next:
        cache.save_next()
        cache.check_integrity()
        n_pieces += 1
    assert (n_pieces, cells.n_used) == (2, 0)
    start(chat[:300])
    seq, n_cached, logits = start(chat)
    assert (n_cached, cells.n_shared) == (len(chat) - 1, 300)
    np.testing.assert_allclose(logits, expected, atol=ROUNDING)
    with Layouts() as layouts:
        compute(backend, seq, [7], start=len(chat))
        layouts.check(cells)
    backend.close()
