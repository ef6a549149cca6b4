from __future__ import annotations

from localrun.engine.cache.stream_cells import StreamCells


def test_streams_count_for_themselves_and_the_longest_decides_the_span():
    cells = StreamCells(100, n_seqs=3, n_away=1)
    cells.place([0, 0, 2, 0])
    cells.set(1, 7)
    assert [cells.length(seq) for seq in range(4)] == [3, 7, 1, 0]
    assert (cells.n_used, cells.span, cells.n_free) == (11, 7, 93)


def test_prompts_in_the_making_use_cells_but_do_not_lengthen_the_span_of_the_streams():
    cells = StreamCells(100, n_seqs=2, n_away=2)
    cells.set(0, 10)
    cells.set(3, 90)
    assert (cells.n_used, cells.span, cells.n_free) == (100, 10, 90)


def test_a_sequence_that_ends_gives_everything_back():
    cells = StreamCells(100, n_seqs=2, n_away=0)
    cells.place([1] * 40)
    cells.set(1, 0)
    assert (cells.n_used, cells.span, cells.n_free, cells.n_shared) == (0, 0, 100, 0)
