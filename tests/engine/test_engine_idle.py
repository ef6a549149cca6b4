"""What an engine says of itself while nothing runs."""

from __future__ import annotations

from tests.engine.harness import Harness


def test_cells_that_become_free_while_idle_are_news():
    harness = Harness(n_cells=1024)
    harness.submit(1, "hello, who is there?", n_predict=4)
    harness.run()
    assert harness.steps[-1].stats.kv_cells_used == 0
    assert harness.steps[-1].stats.cached_sequences == 1
    assert harness.step() is None
