"""Indices and positions against a list of every row's position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.backend import MediaChunk
from localrun.engine.native.rows import Positions
from localrun.wire import Media, MediaKind

MEDIA = Media(MediaKind.IMAGE, "", b"")
# How much text comes before a chunk, its rows, and its positions.
chunks = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 12)).flatmap(
        lambda sizes: st.tuples(st.just(sizes[0]), st.just(sizes[1]), st.integers(1, sizes[1]))
    ),
    max_size=4,
)


def chunk(n_tokens: int, n_pos: int) -> MediaChunk:
    return MediaChunk(n_tokens, n_pos, True, MEDIA, 0)


@given(chunks)
def test_positions_are_those_of_rows_laid_out_one_by_one(sizes: list[tuple[int, int, int]]):
    table, rows, inside, position = [], [], set(), 0
    for n_before, n_tokens, n_pos in [*sizes, (6, 0, 0)]:
        rows += range(position, position + n_before)
        position += n_before
        if not n_tokens:
            break
        table.append((len(rows), chunk(n_tokens, n_pos)))
        if n_pos == n_tokens:
            rows += range(position, position + n_pos)
        else:
            inside |= set(range(len(rows) + 1, len(rows) + n_tokens))
            rows += [position] * n_tokens
        position += n_pos
    positions = Positions(tuple(table))
    free = [index for index in range(len(rows)) if index not in inside]
    assert [positions.at(index) for index in range(len(rows))] == rows
    assert [index for index in range(len(rows)) if positions.is_inside(index)] == sorted(inside)
    assert positions.of_rows(np.array(free, np.int32)).tolist() == [rows[index] for index in free]
    for index in free:
        assert positions.first_index(rows[index]) == index
    for index, found in enumerate(rows):
        behind = max(other for other, same in enumerate(rows) if same == found) + 1
        assert positions.index_after(found) == behind
        assert positions.at(index, behind=True) == (
            (rows[behind] if behind < len(rows) else position) if index in inside else found
        )
    assert bool(positions) == any(n_tokens != n_pos for _, n_tokens, n_pos in sizes)


@pytest.mark.parametrize(
    "table", [((-1, chunk(2, 2)),), ((0, chunk(0, 0)),), ((0, chunk(2, 3)),), ((4, chunk(3, 1)), (6, chunk(3, 1)))]
)
def test_chunks_that_no_sequence_can_have_are_refused(table: tuple[tuple[int, MediaChunk], ...]):
    with pytest.raises(ValueError, match="a chunk of"):
        Positions(table)


def test_a_picture_one_row_high_stands_at_one_position_where_positions_have_parts():
    thin, sound = chunk(187, 187), MediaChunk(187, 187, True, Media(MediaKind.AUDIO, "", b""), 0)
    apart = Positions(((14, thin),), has_parts=True)
    assert (apart.at(200), apart.index_after(14), apart.at(201)) == (14, 201, 201)
    for in_line in (Positions(((14, thin),)), Positions(((14, sound),), has_parts=True)):
        assert (in_line.at(200), in_line.index_after(14), in_line.at(201)) == (200, 15, 201)
