"""The bytes of a saved attention state, cut by positions and joined again. Pure.

`llama_state_seq_get_data` saves a whole sequence. A prompt's beginning that many share should be kept once, and a
conversation that grew by a hundred tokens should not be saved anew, so the bytes are cut into *slices*: the rows of
positions [start, end), one block per layer, keys before values, positions ascending. `join` makes a state of slices
that the same context accepts, whatever cells it came from and whether its KV streams are split or unified.

The format is that of the pinned llama.cpp (`llama_kv_cache::state_write`), little-endian as the machine:

    magic u32 | sequence i32 | streams u32
    per stream: cells u32, and if there are any
        per cell: position i32 | sequences u32 (1) | extra | sequence i32
        values transposed u32 (0) | layers u32
        per layer: key type i32 | bytes per row u64 | rows
        per layer: value type i32 | bytes per row u64 | rows

`extra` is empty but for models whose positions have several parts (M-RoPE): there it is x i32 | y i32 | token i32. All
rows of a picture stand at one position and differ in x and y, so what is called a position here is an *index* then: the
rank of the row by position, y and x. A slice of such a state begins with what its cells say, 16 bytes for each.

It is not promised to anybody, so nothing is assumed: `StateLayout.of` checks every field and the total length of a real
state, and a state that differs (transposed values) has no layout, which callers must allow for.

Does not: know tokens, or call the library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_HEAD = struct.Struct("=IiI")
_CELL = np.dtype([("pos", "<i4"), ("n_seqs", "<u4"), ("seq", "<i4")])
_WIDE_CELL = np.dtype([("pos", "<i4"), ("n_seqs", "<u4"), ("x", "<i4"), ("y", "<i4"), ("token", "<i4"), ("seq", "<i4")])
# What a slice says of a wide cell.
_PLACE = np.dtype([(name, "<i4") for name in ("pos", "x", "y", "token")])
_LAYERS = struct.Struct("=II")
_TENSOR = struct.Struct("=iQ")


@dataclass(frozen=True)
class StateLayout:
    """What is the same in all states of one context: `magic`, and type and bytes per row of each key and value tensor,
    keys first. `is_wide`: its cells have the extra fields."""

    magic: int
    tensors: tuple[tuple[int, int], ...]
    is_wide: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in a slice."""
        return self._place_bytes + sum(row_bytes for _, row_bytes in self.tensors)

    @property
    def _place_bytes(self) -> int:
        return _PLACE.itemsize if self.is_wide else 0

    @property
    def _cell(self) -> np.dtype[np.void]:
        return _WIDE_CELL if self.is_wide else _CELL

    @classmethod
    def of(cls, state: bytes | bytearray | memoryview) -> StateLayout | None:
        """The layout of a real state that is not empty; None for one that cannot be cut."""
        for is_wide in (False, True):
            try:
                return cls._read(state, is_wide=is_wide)
            except (struct.error, ValueError):
                continue
        return None

    @classmethod
    def _read(cls, state: bytes | bytearray | memoryview, *, is_wide: bool) -> StateLayout:
        magic, _, n_streams = _HEAD.unpack_from(state)
        at, n_cells = _skip_to_cells(state, n_streams)
        n_rest = 4 * n_streams - (at - _HEAD.size)  # the streams after this one, all empty
        cells = np.frombuffer(state, _WIDE_CELL if is_wide else _CELL, n_cells, at)
        if not (cells["n_seqs"] == 1).all():
            raise ValueError("cells are not as expected")
        at += cells.nbytes
        is_transposed, n_layers = _LAYERS.unpack_from(state, at)
        if is_transposed or not 0 < n_layers < 4096:
            raise ValueError("values are transposed")
        at += _LAYERS.size
        tensors = []
        for _ in range(2 * n_layers):
            kind, row_bytes = _TENSOR.unpack_from(state, at)
            at += _TENSOR.size + row_bytes * n_cells
            if not row_bytes or at > len(state):
                raise ValueError("rows are not as expected")
            tensors.append((kind, row_bytes))
        if len(state) - at != n_rest or any(bytes(state[at:])):
            raise ValueError("the length is not as expected")
        return cls(magic, tuple(tensors), is_wide)

    def slice(self, state: bytearray | Bytes, start: int, end: int, *, first: int = 0) -> Bytes:
        """The rows of positions [start, end) of a state of this layout. The rank of rows counts from index `first`.
        Raises ValueError if it has not all of them."""
        data = np.frombuffer(state, np.uint8)
        _, _, n_streams = _HEAD.unpack(data[: _HEAD.size].tobytes())
        at, n_cells = _skip_to_cells(data, n_streams)
        cells = np.frombuffer(data, self._cell, n_cells, at)
        rows = _ranked(cells, start - first, end - first) if self.is_wide else _rows_of(cells["pos"], start, end)
        at += cells.nbytes + _LAYERS.size
        result = np.empty((end - start) * self.token_bytes, np.uint8)
        to = (end - start) * self._place_bytes
        if self.is_wide:
            result[:to].view(_PLACE)[:] = cells[rows][list(_PLACE.names or ())]
        for _, row_bytes in self.tensors:
            at += _TENSOR.size
            block = data[at : at + n_cells * row_bytes].reshape(n_cells, row_bytes)
            size = (end - start) * row_bytes
            result[to : to + size].reshape(end - start, row_bytes)[:] = block[rows]
            to += size
            at += n_cells * row_bytes
        return result

    def for_streams(self, buffer: Bytes, size: int, *, n_streams: int) -> Bytes:
        """The state in the first `size` bytes of a buffer, changed in place into one for a context of so many streams.
        The buffer has `head_bytes(n_streams)` more; the result lies in it."""
        _, _, n_before = _HEAD.unpack(buffer[: _HEAD.size].tobytes())
        at, n_cells = _skip_to_cells(buffer[:size], n_before)
        end = size - (4 * n_before - (at - _HEAD.size))
        begin = at - 4 - _HEAD.size
        _HEAD.pack_into(buffer.data, begin, self.magic, 0, n_streams)
        np.frombuffer(buffer.data, self._cell, n_cells, at)["seq"] = 0
        n_rest = 4 * (n_streams - 1)
        buffer[end : end + n_rest] = 0  # the other streams have no cells
        return buffer[begin : end + n_rest]

    @staticmethod
    def head_bytes(n_streams: int) -> int:
        """What a state begins with before its cells."""
        return _HEAD.size + 4 * n_streams

    def size_bytes(self, n_cells: int, *, n_streams: int) -> int:
        """Bytes of a joined state."""
        size = _HEAD.size + 4 * n_streams + n_cells * self._cell.itemsize + _LAYERS.size
        return size + sum(_TENSOR.size + n_cells * row_bytes for _, row_bytes in self.tensors)

    def join(
        self,
        pieces: Iterable[tuple[Bytes | bytes | bytearray, int, int, int]],
        *,
        n_streams: int,
        into: bytearray | Bytes,
    ) -> Bytes:
        """A state of the positions of (slice, its first position, start, end) that follow each other.

        Each piece contributes [start, end) of its slice. `n_streams` is the number of KV streams of the context. The
        result lies in `into`, which has at least `size_bytes`.
        """
        parts = [(np.frombuffer(data, np.uint8), first, start, end) for data, first, start, end in pieces]
        begin = parts[0][2]
        n_cells = parts[-1][3] - begin
        view = np.frombuffer(into, np.uint8, self.size_bytes(n_cells, n_streams=n_streams))
        state = view.data
        _HEAD.pack_into(state, 0, self.magic, 0, n_streams)
        struct.pack_into("=I", state, _HEAD.size, n_cells)
        at = _HEAD.size + 4
        cells = np.frombuffer(state, self._cell, n_cells, at)
        cells["n_seqs"], cells["seq"] = 1, 0
        if self.is_wide:
            for data, first, start, end in parts:
                places = data[: data.size // self.token_bytes * _PLACE.itemsize].view(_PLACE)
                for name in _PLACE.names or ():
                    cells[name][start - begin : end - begin] = places[name][start - first : end - first]
        else:
            cells["pos"] = np.arange(begin, begin + n_cells)
        at += cells.nbytes
        _LAYERS.pack_into(state, at, 0, len(self.tensors) // 2)
        at += _LAYERS.size
        widths = [data.size // self.token_bytes for data, *_ in parts]
        before = [width * self._place_bytes for width in widths]  # where the tensor at hand begins in each slice
        for kind, row_bytes in self.tensors:
            _TENSOR.pack_into(state, at, kind, row_bytes)
            at += _TENSOR.size
            for index, (data, first, start, end) in enumerate(parts):
                source = before[index] + (start - first) * row_bytes
                size = (end - start) * row_bytes
                view[at : at + size] = data[source : source + size]
                before[index] += widths[index] * row_bytes
                at += size
        view[at:] = 0  # the other streams have no cells
        return view


def _skip_to_cells(state: bytes | bytearray | memoryview | Bytes, n_streams: int) -> tuple[int, int]:
    """Where the cells of the one stream that is not empty begin, and how many there are."""
    at = _HEAD.size
    if not 0 < n_streams <= 4096:
        raise ValueError("streams are not as expected")
    for _ in range(n_streams):
        (n_cells,) = struct.unpack("=I", bytes(state[at : at + 4]))
        at += 4
        if n_cells:
            return at, n_cells
    raise ValueError("an empty state")


def _ranked(cells: NDArray[np.void], start: int, end: int) -> slice | NDArray[np.intp]:
    """Where the rows of ranks [start, end) lie, by position, y and x: a plain slice where they are in order."""
    if not 0 <= start <= end <= cells.size:
        raise ValueError(f"the state has {cells.size} rows, not all of [{start}, {end})")
    positions, (y, x) = cells["pos"], (cells[name].astype(np.int64) for name in ("y", "x"))
    further = np.diff(positions)
    if ((further > 0) | (further == 0) & (np.diff((y << 32) + x) > 0)).all():
        return slice(start, end)
    return np.lexsort((x, y, positions))[start:end]


def _rows_of(positions: NDArray[np.int32], start: int, end: int) -> slice | NDArray[np.intp]:
    """Where positions [start, end) lie: a plain slice where they are in order, as they nearly always are."""
    count = end - start
    if positions.size >= end and np.array_equal(positions[start:end], np.arange(start, end)):
        return slice(start, end)
    rows = np.flatnonzero((positions >= start) & (positions < end))
    rows = rows[np.argsort(positions[rows])]
    if rows.size != count:
        raise ValueError(f"the state has {rows.size} of the {count} positions [{start}, {end})")
    return rows
