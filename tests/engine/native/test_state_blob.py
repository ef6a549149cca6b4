"""Cutting and joining states in the documented format, made up here byte by byte."""

from __future__ import annotations

import struct
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.native.states import StateLayout

MAGIC = 0x1234ABCD
# Type and bytes per row of a key and a value tensor for each of two layers, all different.
TENSORS = ((1, 8), (1, 4), (8, 6), (2, 10))


def row(tensor: int, position: int) -> bytes:
    """What a tensor holds of a position: no two rows are alike."""
    return Random(tensor * 100_003 + position).randbytes(TENSORS[tensor][1])


def blob(
    order: list[int], *, n_streams: int = 1, stream: int = 0, seq: int = 5, transposed: int = 0, n_owners: int = 1
) -> bytearray:
    """A saved sequence whose cells hold the positions `order`, one after another, in one of the streams."""
    state = bytearray(struct.pack("=IiI", MAGIC, seq, n_streams))
    for number in range(n_streams):
        state += struct.pack("=I", len(order) if number == stream else 0)
        if number != stream or not order:
            continue
        for position in order:
            state += struct.pack("=iIi", position, n_owners, seq)
        state += struct.pack("=II", transposed, len(TENSORS) // 2)
        for tensor, (kind, row_bytes) in enumerate(TENSORS):
            state += struct.pack("=iQ", kind, row_bytes)
            state += b"".join(row(tensor, position) for position in order)
    return state


def layout_of(state: bytearray) -> StateLayout:
    layout = StateLayout.of(state)
    assert layout is not None
    return layout


def joined_by(layout: StateLayout, pieces: list[tuple[Any, int, int, int]], *, n_streams: int) -> bytearray:
    """A joined state, made in a buffer that is larger than needed and full of something else."""
    size_bytes = layout.size_bytes(pieces[-1][3], n_streams=n_streams)
    into = bytearray(b"\xff") * (size_bytes + 50)
    joined = layout.join(pieces, n_streams=n_streams, into=into)
    assert joined.nbytes == size_bytes
    assert into[size_bytes:] == b"\xff" * 50
    return bytearray(joined.tobytes())


def test_a_layout_says_what_all_states_of_a_context_have_in_common():
    layout = layout_of(blob([0, 1, 2]))
    assert (layout.magic, layout.tensors, layout.token_bytes) == (MAGIC, TENSORS, 28)
    assert layout_of(blob([2, 0, 1], n_streams=4, stream=2, seq=1)) == layout


def test_a_slice_is_one_block_per_tensor_with_positions_ascending():
    state = blob([3, 0, 2, 1])
    expected = b"".join(row(tensor, position) for tensor in range(4) for position in (1, 2))
    assert layout_of(state).slice(state, 1, 3).tobytes() == expected


shapes = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda shape: (shape[0], shape[1] % shape[0]))


@given(st.integers(1, 24), st.data(), shapes, st.integers(1, 4))
@settings(max_examples=100)
def test_slices_joined_are_the_same_sequence_in_order_whatever_cells_and_streams_it_came_from(
    n_tokens: int, data: st.DataObject, shape: tuple[int, int], n_streams: int
):
    order = data.draw(st.permutations(range(n_tokens)))
    state = blob(order, n_streams=shape[0], stream=shape[1])
    layout = layout_of(state)
    cuts = sorted(data.draw(st.sets(st.integers(1, n_tokens - 1)))) if n_tokens > 1 else []
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, n_tokens], strict=True):
        # A slice may hold more than its piece takes of it.
        first = data.draw(st.integers(0, start))
        pieces.append((layout.slice(state, first, data.draw(st.integers(end, n_tokens))), first, start, end))
    joined = joined_by(layout, pieces, n_streams=n_streams)
    assert joined == blob(list(range(n_tokens)), n_streams=n_streams, seq=0)
    assert layout_of(joined) == layout


def test_a_slice_may_come_as_bytes_or_as_an_array():
    state = blob([0, 1, 2])
    layout = layout_of(state)
    part = layout.slice(state, 0, 3)
    as_bytes = joined_by(layout, [(part.tobytes(), 0, 0, 3)], n_streams=1)
    assert as_bytes == joined_by(layout, [(part, 0, 0, 3)], n_streams=1)


def test_the_beginning_of_a_state_can_be_taken_where_the_rest_is_left():
    state = blob([4, 3, 2, 1, 0])
    layout = layout_of(state)
    joined = joined_by(layout, [(layout.slice(state, 0, 5), 0, 0, 2)], n_streams=1)
    assert joined == blob([0, 1], seq=0)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 2, 3]])
def test_positions_that_a_state_does_not_have_are_told(order: list[int]):
    state = blob(order)
    with pytest.raises(ValueError, match="positions"):
        layout_of(state).slice(state, 1, 4)


@pytest.mark.parametrize(
    "state",
    [
        b"",
        blob([0, 1], transposed=1),
        blob([0, 1], n_owners=2),
        blob([]),
        blob([], n_streams=3),
        blob([0, 1]) + bytes(1),
        blob([0, 1]) + bytes(4),
        blob([0, 1], n_streams=2) + b"\0\0\1\0",
        blob([0, 1], n_streams=3)[:-4],
        blob([0, 1], n_streams=2, stream=1) + blob([0, 1]),
        struct.pack("=IiI", MAGIC, 0, 1 << 31),
    ],
)
def test_a_state_that_differs_in_anything_has_no_layout(state: bytes):
    assert StateLayout.of(state) is None


def test_a_truncated_state_has_no_layout_wherever_it_ends():
    state = blob([0, 1, 2], n_streams=2)
    assert not any(StateLayout.of(state[:end]) for end in range(len(state)))


@given(st.integers(0, 255), st.data())
@settings(max_examples=200)
def test_a_changed_byte_raises_nothing_but_gives_no_layout_or_one_of_the_same_length(value: int, data: st.DataObject):
    state = blob([1, 0, 2])
    state[data.draw(st.integers(0, len(state) - 1))] = value
    layout = StateLayout.of(state)
    assert layout is None or layout.token_bytes == 28


def test_slices_of_an_array_and_of_a_bytearray_are_the_same():
    state = blob([1, 0, 2])
    layout = layout_of(state)
    assert np.array_equal(layout.slice(np.frombuffer(state, np.uint8), 0, 3), layout.slice(state, 0, 3))


# A prompt of two tokens, a picture of 2 x 3 rows at one position, and a token: position, x, y, token.
PLACES = [(0, 0, 0, 7), (1, 1, 1, 8), *((2, 2 + x, 2 + y, -1) for y in range(2) for x in range(3)), (5, 5, 5, 9)]


def wide_blob(order: list[int], *, n_streams: int = 1) -> bytearray:
    """As `blob`, with places that are not told apart by their positions."""
    state = bytearray(struct.pack("=IiI", MAGIC, 5, n_streams))
    state += struct.pack("=I", len(order))
    for index in order:
        position, x, y, token = PLACES[index]
        state += struct.pack("=iIiiii", position, 1, x, y, token, 5)
    state += struct.pack("=II", 0, len(TENSORS) // 2)
    for tensor, (kind, row_bytes) in enumerate(TENSORS):
        state += struct.pack("=iQ", kind, row_bytes)
        state += b"".join(row(tensor, index) for index in order)
    return state + bytes(4 * (n_streams - 1))


@given(st.permutations(range(len(PLACES))), st.integers(0, len(PLACES)), st.integers(0, len(PLACES)))
@settings(max_examples=100)
def test_rows_of_a_picture_are_cut_by_their_places(order: list[int], one: int, other: int):
    state, n_rows = wide_blob(order), len(PLACES)
    layout = layout_of(state)
    assert (layout.is_wide, layout.token_bytes) == (True, 28 + 16)
    ordered = wide_blob(list(range(n_rows)))
    cuts = sorted({0, one, other, n_rows})
    pieces = [(bytes(layout.slice(state, start, end)), start, start, end) for start, end in pairwise(cuts)]
    joined = joined_by(layout, pieces, n_streams=2)
    for start, end in pairwise(cuts):
        expected = bytes(layout.slice(ordered, start, end))
        assert bytes(layout.slice(state, start, end)) == bytes(layout.slice(joined, start, end)) == expected
        assert bytes(layout.slice(state, start + 30, end + 30, first=30)) == expected
