"""Split streams and one pool over the same cells, on the real backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.engine.engine import Engine, Limits
from localrun.wire import Finish, Sampling, Submit
from tests.engine.conftest import open_tiny


@pytest.mark.parametrize(("n_cells", "n_seqs"), [(1000, 8), (1024, 8), (1600, 6), (512, 2)])
def test_one_pool_has_all_cells_of_the_streams(tiny_gguf: Path, n_cells: int, n_seqs: int):
    """llama.cpp makes every stream a multiple of 256 cells long, and one pool as well."""
    backend = open_tiny(tiny_gguf, n_cells=n_cells, n_seqs=n_seqs, may_split=True)
    n_ctx = backend.n_ctx
    assert n_ctx == backend.n_cells >= n_cells
    for is_split in (False, True, False):
        backend.rebuild(split=is_split)
        assert backend.n_cells == backend.n_ctx == n_ctx
    backend.close()


def test_the_longest_request_that_is_accepted_comes_to_its_end(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=1000, n_seqs=8, may_split=True)
    engine = Engine(backend, Limits(8, 8, 0.0, 1 << 24), lambda: 0.0)
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
