"""What the engine needs from the thing that owns sequences, cells and kept prefixes.

Three implementations: `stream_pool.StreamPool` for split KV, `kv_pool.KvPool` for one unified pool, where prefixes are
shared, and `state_pool.StatePool` where a sequence's state is whole or nothing. Owner: the engine's main thread.

A request's sequence lives from `acquire` to `release` or `forget`. In between the engine places the rows of every step
in `cells` and tells with `publish` how far the prompt is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from localrun.engine.cache.kv_store import KvStore

# More cells than there are anywhere.
UNCOUNTED = 1 << 40


@dataclass(frozen=True)
class Lease:
    """A sequence for a request, with the tokens that the cache already gave."""

    seq: int
    n_cached: int


class Cells(Protocol):
    """How full the backend's cells are. `n_cells` is what one request may use, `n_shared` are held by several."""

    n_cells: int

    @property
    def n_used(self) -> int: ...

    @property
    def n_free(self) -> int: ...

    @property
    def n_shared(self) -> int: ...

    @property
    def span(self) -> int:
        """The cells that a row attends over, used or not."""

    def place(self, rows: list[int]) -> None:
        """A step appended one token to the sequence of each row."""


class Pool(Protocol):
    """See the module. Every token list begins at position 0."""

    @property
    def cells(self) -> Cells: ...

    @property
    def store(self) -> KvStore: ...

    @property
    def n_cached_sequences(self) -> int:
        """Prefixes kept for later."""

    @property
    def can_settle(self) -> bool:
        """Whether `settle` has something to do."""

    def match(self, tokens: list[int]) -> int:
        """How many leading tokens an `acquire` would get without computing. The last token is never among them."""

    def follow(self, seq: int, tokens: list[int], n_matched: int) -> bool:
        """Whether a request for `tokens`, of which `n_matched` can be had now, gains by waiting for running `seq`,
        which is computing more of the same beginning."""

    def n_obtainable(self, tokens: list[int]) -> int:
        """Cells that a request for `tokens` could have if all kept prefixes had to go, shared ones included."""

    def acquire(self, tokens: list[int]) -> Lease | None:
        """A sequence that already holds as much of `tokens` as the cache has. None if no sequence id is left.

        The list is the request's own: the pool may look at it as long as the sequence runs.
        """

    def next_stop(self, seq: int, n_computed: int) -> int | None:
        """A position behind `n_computed` at which a step of this sequence must end; None if it may go on for ever."""

    def make_room(self, n_cells: int) -> bool:
        """Free cells by moving kept prefixes out. False if that is not enough."""

    def publish(self, seq: int, tokens: list[int]) -> None:
        """A running sequence holds `tokens` now: others may profit."""

    def rewind(self, seq: int, n_tokens: int) -> int:
        """A step failed half way: put a running sequence back to its first `n_tokens`, or to fewer where that cannot
        be. Returns how many it holds."""

    def release(self, seq: int, tokens: list[int]) -> None:
        """A request is done with its sequence, which holds `tokens`: they are kept for later, if that pays."""

    def forget(self, seq: int) -> None:
        """Drop a running sequence and everything in its cells."""

    def settle(self) -> None:
        """Move one kept prefix out of the cells."""

    def bring_home(self, seq: int) -> int:
        """The prompt of a running sequence is done, in the background. Returns the sequence that it goes on in."""

    def compact(self) -> tuple[int, int] | None:
        """Move one running sequence to where its rows cost less. Returns its old and new number if that changes."""

    def retire(self) -> None:
        """Save all that is kept in cells, which will be lost."""

    def clear(self, *, ram: bool, disk: bool) -> None:
        """Forget kept prefixes: those in cells and memory, those on disk, or both. Running sequences keep theirs."""

    def check_integrity(self) -> None:
        """Raises AssertionError where the books disagree."""
