"""What the disk tier stores and guarantees, without how: shared by the KV store and by tests. Pure.

A record describes one saved block of a sequence: the tokens [start, start + len(tokens)) of a path from the root, and
how the backend's state bytes for them are laid out. Its key names it and its place under its parent.

Invariant: a key is a name, never a proof. Code that finds a record by its key compares parent, start and tokens.
Does not: touch files (`disk.py`), or hold state bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import State

KEY_BYTES = 16


@dataclass(frozen=True, eq=False)
class DiskRecord:
    """A saved block. `parent_key` is empty below a root; `root` then names the root unless it is the usual one.
    `order` is no longer used. `is_whole`: the bytes are the state of the whole path, not only of [start, end)."""

    key: bytes
    parent_key: bytes
    start: int
    tokens: list[int]
    order: NDArray[np.int32]
    is_whole: bool
    root: bytes = b""


class DiskTier(Protocol):
    """Saved blocks of one model on disk. Nothing here raises because of a file: what cannot be read is a miss.

    `limit_bytes` bounds all models together. `size_bytes` and `n_entries` are of this model's folder, including what is
    still being written. `may_write` stays False once the disk has refused a write (full, no permission).
    """

    @property
    def limit_bytes(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def n_entries(self) -> int: ...

    @property
    def may_write(self) -> bool: ...

    def scan(self) -> list[DiskRecord]:
        """All entries, parents before their children, and siblings most recently used first. Called once, at start,
        because it takes time. Damaged entries, and those whose parent is gone, are deleted."""

    def write(self, record: DiskRecord, data: State) -> bool:
        """Keep `data`, which must not change from now on. Returns at once; False if it will not be written, because the
        disk is too busy, refuses writes, or lacks the parent."""

    def take_lost(self) -> list[bytes]:
        """Keys of entries that disappeared unasked since the last call: evicted for the limit or by another process, or
        never written after all."""

    def read(self, key: bytes) -> bytearray | None:
        """The state bytes, verified; None if the entry is gone or damaged (it is then deleted)."""

    def touch(self, key: bytes) -> None:
        """Note that an entry was used now. Returns at once."""

    def remove(self, key: bytes) -> None:
        """Forget an entry. Returns at once."""

    def clear(self) -> None:
        """Forget all entries of this model. Returns at once."""

    @property
    def is_behind(self) -> bool:
        """Whether so much is queued that a write may be dropped now. Nothing reports when that ends."""

    def flush(self, deadline_s: float) -> None:
        """Wait until everything requested so far is on disk, at most `deadline_s`."""

    def close(self) -> None:
        """End the background thread after its current job. Queued writes are dropped, so flush first."""


def block_key(parent_key: bytes, start: int, tokens: Sequence[int]) -> bytes:
    """16 bytes that name the block of `tokens` at position `start` below `parent_key` (the root's name at a root)."""
    digest = hashlib.blake2b(parent_key, digest_size=KEY_BYTES, person=b"localrun segment")
    digest.update(start.to_bytes(8, "little"))
    digest.update(np.asarray(tokens, np.int32).astype("<i4", copy=False).tobytes())
    return digest.digest()
