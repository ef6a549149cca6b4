"""The mirror of the KV cells against the real ones: llama.cpp computes a batch exactly when the mirror has room for it.

llama.cpp does not tell where it puts tokens, except in its debug log; `Layouts` reads that.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from localrun.engine.backend import DecodeFailed, NoRoom
from localrun.engine.cache.cells import PoolCells
from localrun.engine.native.library import log_callback, native
from localrun.engine.native.llama import LlamaBackend
from tests.engine.conftest import compute, open_tiny, saved_state

N_SEQS = 8
PROMPT = list(range(300, 340))


def test_a_full_pool_refuses_a_batch_and_stays_as_it_was(tiny_gguf: Path):
    backend = open_tiny(tiny_gguf, n_cells=256, n_seqs=4)
    for start in range(0, 256 - 10, 41):
        own = compute(backend, 0, [5 + start] * 41, start=start)
    assert start + 41 == 246
    with pytest.raises(NoRoom):
        compute(backend, 1, [7] * 11)
    compute(backend, 1, [7] * 10)
    backend.seq_remove(1, 0)
    backend.seq_remove(0, 205)
    np.testing.assert_allclose(compute(backend, 0, [5 + 205] * 41, start=205), own, atol=1e-3)
    backend.close()


def abort_next_decode(backend: LlamaBackend, rows: list[int], cells: PoolCells) -> None:
    """A decode that llama.cpp breaks off after it gave cells to the rows."""
    abort = native.ggml_abort_callback(lambda data: True)
    native.llama_set_abort_callback(backend.main.native, abort, ctypes.c_void_p())
    try:
        with pytest.raises(DecodeFailed) as caught:
            append(backend, rows, cells)
    finally:
        native.llama_set_abort_callback(backend.main.native, native.ggml_abort_callback(), ctypes.c_void_p())
    assert caught.value.is_fatal


def append(backend: LlamaBackend, rows: list[int], cells: PoolCells) -> None:
    """Decode one more token for the sequence of each row."""
    batch, lengths = backend.batch, {seq: cells.length(seq) for seq in rows}
    for row, seq in enumerate(rows):
        batch.token[row], batch.pos[row], batch.seq[row], batch.wants_logits[row] = 5, lengths[seq], seq, 0
        lengths[seq] += 1
    batch.wants_logits[len(rows) - 1] = 1
    backend.decode(len(rows))


def test_an_aborted_step_gives_its_cells_back(backend: LlamaBackend):
    own = compute(backend, 0, PROMPT)
    abort_next_decode(backend, [1] * 20, PoolCells(backend.n_cells, backend.n_seqs))
    np.testing.assert_allclose(compute(backend, 1, PROMPT), own, atol=1e-3)


class Layouts:
    """What llama.cpp, when asked for it, logs of its cells before it places a batch: head, owners and positions."""

    def __init__(self) -> None:
        self.head = -1
        self.owners = self.positions = ""
        self._callback = native.llama_log_callback(self._take)

    def __enter__(self) -> Layouts:
        native.llama_log_set(self._callback, None)
        return self

    def __exit__(self, *_: object) -> None:
        native.llama_log_set(log_callback, None)

    def _take(self, level: int, text: bytes, data: object) -> None:
        line = text.decode()
        if found := re.search(r"find_slot: stream.* head = +(\d+)", line):
            self.head = int(found[1])
        elif line.startswith("\n"):
            self.owners, self.positions = self.positions, line

    def check(self, cells: PoolCells) -> None:
        """That the last logged layout is the one of `cells`, which were not changed since."""
        owners = self.owners.replace(" *", "").replace("\n", "")
        positions = self.positions.replace("*", "").split()
        expected_owners, expected_positions = ["."] * cells.n_cells, ["."] * cells.n_cells
        for seq in range(N_SEQS):
            for position, cell in enumerate(cells.cells_of(seq).tolist()):
                expected_owners[cell] = str(seq) if cells.refs[cell] == 1 else "M"
                expected_positions[cell] = str(position)
        assert owners == "".join(expected_owners)
        assert positions == expected_positions
        assert cells.refs[: self.head].all(), "a free cell below llama.cpp's head: the mirror's rule does not hold"


@pytest.mark.parametrize("seed", range(6))
def test_the_mirror_has_every_token_in_the_cell_where_llama_has_it(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    """Random work on few cells, so that the pool is full, fragmented and wrapped round most of the time. A batch is
    computed exactly when the mirror has room for it."""
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "3")
    backend = open_tiny(tiny_gguf, n_cells=256, n_seqs=N_SEQS)
    random = Random(seed)
    cells = PoolCells(256, N_SEQS)
    saved: list[tuple[bytearray, np.ndarray]] = []
    done: Counter[str] = Counter()
    with Layouts() as layouts:
        for _ in range(150):
            seq, other = random.sample(range(N_SEQS), 2)
            rows = [seq] * random.randint(1, 32) + [other] * random.randint(0, 8)
            act = random.choice(["append", "append", "append", "abort", "cut", "clear", "share", "save", "restore"])
            if act in ("append", "abort") and len(rows) > cells.n_free:
                act = "full"
                with pytest.raises(NoRoom):
                    append(backend, rows, cells)
                layouts.check(cells)
            elif act == "append":
                append(backend, rows, cells)
                layouts.check(cells)
                cells.place(rows)
            elif act == "abort":
                abort_next_decode(backend, rows, cells)
                layouts.check(cells)
            elif act in ("cut", "clear"):
                length = random.randint(0, cells.length(seq)) if act == "cut" else 0
                assert backend.seq_remove(seq, length)
                cells.truncate(seq, length)
            elif act == "share" and cells.length(seq) == 0:
                length = random.randint(0, cells.length(other))
                backend.seq_share(other, seq, 0, length)
                cells.share(other, seq, 0, length)
            elif act == "save" and cells.length(seq):
                saved.append((saved_state(backend, seq), np.argsort(cells.cells_of(seq))))
            elif act == "restore" and saved and cells.length(seq) == 0:
                state, order = random.choice(saved)
                is_done = backend.state_set(seq, state)
                assert is_done == (order.size <= cells.n_free)
                layouts.check(cells)
                if is_done:
                    cells.fill(seq, order.size)
                    cells.cells_of(seq)[order] = cells.cells_of(seq).copy()  # in the order in which they were saved
            done[act] += 1
            cells.check_integrity()
    backend.close()
    assert len(done) == 8, f"the trace did not do everything: {done}"
