"""Saved sequence states in two tiers: memory first, then disk, each within its bytes.

Owner: the engine's main thread. What a tier holds is a tree of segments (`segments.py`). When memory is full, the
segment with the least *priority* leaves it, to disk if there is one: priority is recompute seconds per byte, on top of
a clock that rises to the priority of whatever was dropped last. So what is dear to compute stays longer, and what
nobody used for long sinks whatever it cost (GreedyDual-Size: Cao and Irani, "Cost-aware WWW proxy caching algorithms",
1997). A segment leaves memory after what hangs below it.

Segments are written to disk when they leave memory, when the engine has nothing else to do (`persist`), and at the end
(`flush`); never in a step's way, for the disk tier has a thread of its own. What the disk loses meanwhile, by its bound
or because a write failed, leaves the tree too (`match` sees to it), unless its bytes are in memory.

Invariant: `size_bytes`, the bytes in memory, is never above `limit_bytes`.
Does not: make or cut states (the pools do), bound the disk's bytes (`disk.py` does), or know what anything costs:
`recompute_s` is asked.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import State
from localrun.engine.cache.disk_record import DiskTier
from localrun.engine.cache.segments import Path, Segment, SegmentTree


class KvStore:
    """See the module. `recompute_s(start, n_tokens)` is what computing tokens from a position on would take.

    `ram_hit_tokens` and `disk_hit_tokens` count what loads saved.
    """

    def __init__(
        self,
        limit_bytes: int,
        disk: DiskTier | None = None,
        recompute_s: Callable[[int, int], float] = lambda start, n_tokens: n_tokens * 1e-3,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.recompute_s = recompute_s
        self.size_bytes = 0
        self.ram_hit_tokens = 0
        self.disk_hit_tokens = 0
        self._disk = disk
        self._tree = SegmentTree()
        self._resident: dict[bytes, Segment] = {}
        self._dirty: dict[bytes, Segment] = {}
        self._clock = 0.0
        self._uses = 0
        if disk is not None:
            self._read_disk(disk)

    def __len__(self) -> int:
        return len(self._tree.segments)

    @property
    def is_on(self) -> bool:
        """Whether anything can be kept at all."""
        return self.limit_bytes > 0 or self._takes_writes

    @property
    def most_bytes(self) -> int:
        """What one prompt can have at most."""
        return max(self.limit_bytes, self._disk.limit_bytes if self._disk and self._takes_writes else 0)

    @property
    def n_ram_entries(self) -> int:
        return len(self._resident)

    @property
    def disk_bytes(self) -> int:
        return self._disk.size_bytes if self._disk else 0

    @property
    def n_disk_entries(self) -> int:
        return self._disk.n_entries if self._disk else 0

    @property
    def can_persist(self) -> bool:
        """Whether `persist` has something to do."""
        return bool(self._dirty) and self._takes_writes and not (self._disk and self._disk.is_behind)

    def match(self, tokens: list[int], limit: int, *, whole: bool = False) -> Path:
        """The longest saved beginning of `tokens[:limit]`, in memory or on disk. Its segments stay until the next call,
        but for those that have to make room."""
        self._forget_lost()
        return self._tree.match(tokens, limit, whole=whole)

    def wholes(self, tokens: list[int]) -> list[Segment]:
        """The whole segments that `tokens` begins with, shortest first."""
        return self._tree.wholes(tokens, len(tokens))

    def add(
        self,
        parent: Segment | None,
        start: int,
        tokens: list[int],
        order: NDArray[np.int32],
        data: State,
        *,
        is_whole: bool = False,
    ) -> Segment | None:
        """Keep the state of `tokens` below `parent`, where `match` must have found the end. None if it does not fit."""
        fits_memory = self._make_room(len(data), spare=parent)
        if not fits_memory and not self._takes_writes:
            return None
        segment = self._tree.add(parent, start, tokens, order, is_whole=is_whole)
        segment.size_bytes = len(data)
        self._rank(segment)
        if fits_memory:
            self._admit(segment, data)
            self._dirty[segment.key] = segment
        elif not self._write(segment, data):
            self._tree.remove(segment)
            return None
        return segment

    def load(self, segment: Segment) -> State | None:
        """The bytes of a segment, from disk if need be. None if they are gone, and the segment with them."""
        if segment.data is not None:
            self.ram_hit_tokens += len(segment.tokens)
            return segment.data
        is_known = self._tree.segments.get(segment.key) is segment  # another one may have its key by now
        data = self._disk.read(segment.key) if self._disk and is_known else None
        if data is None:
            self.drop(segment)
            return None
        self.disk_hit_tokens += len(segment.tokens)
        segment.size_bytes = len(data)
        if self._make_room(len(data), spare=segment.parent):
            self._admit(segment, data)
        return data

    def touch(self, path: Path) -> None:
        """A path was used now."""
        for segment in reversed(path.segments):  # the root last, so that on disk it is always newer than its children
            self._rank(segment)
            if self._disk and segment.is_on_disk:
                self._disk.touch(segment.key)

    def drop(self, segment: Segment) -> None:
        """Forget a segment and everything below it, in both tiers. One that is gone already is no error."""
        if self._tree.segments.get(segment.key) is not segment:
            return
        for gone in self._tree.remove(segment):
            self._expel(gone)
            if self._disk and gone.is_on_disk:
                self._disk.remove(gone.key)

    def clear(self, *, ram: bool = True, disk: bool = True) -> None:
        """Forget everything in memory, on disk, or both. What one tier alone has lost stays in the other."""
        for segment in list(self._tree.segments.values()):
            if self._tree.segments.get(segment.key) is not segment:
                continue  # went with its parent
            if disk and segment.is_on_disk:
                segment.is_on_disk = False
                if segment.data is not None:
                    self._dirty[segment.key] = segment
            if ram and segment.is_on_disk:
                self._expel(segment)
            elif ram or segment.data is None:
                self.drop(segment)
        if disk and self._disk:
            self._disk.clear()

    def persist(self) -> None:
        """Hand one segment that is in memory alone to the disk tier, parents first."""
        self._forget_lost()
        segment = next(iter(self._dirty.values()), None)
        if segment is None:
            return
        while segment.parent is not None and segment.parent.key in self._dirty:
            segment = segment.parent
        assert segment.data is not None
        self._write(segment, segment.data)

    def flush(self, deadline_s: float, clock: Callable[[], float]) -> None:
        """At the end: write what is in memory alone, and wait for it at most so long by `clock`."""
        if self._disk is None:
            return
        ends_at_s = clock() + deadline_s
        while self._dirty and self._takes_writes and clock() < ends_at_s:
            if self._disk.is_behind:
                self._disk.flush(ends_at_s - clock())
            else:
                self.persist()
        self._disk.flush(max(0.0, ends_at_s - clock()))
        self._disk.close()

    def check_integrity(self) -> None:
        """Raises AssertionError if the books are wrong."""
        self._tree.check_integrity()
        resident = {key: segment for key, segment in self._tree.segments.items() if segment.data is not None}
        assert resident == self._resident, "segments in memory differ from the tree's"
        assert self.size_bytes == sum(segment.size_bytes for segment in resident.values()), "size_bytes is wrong"
        assert self.size_bytes <= self.limit_bytes, "over the limit"
        for segment in self._tree.segments.values():
            assert segment.data is not None or segment.is_on_disk, "a segment without bytes anywhere"
            is_dirty = segment.key in self._dirty
            assert not is_dirty or not segment.is_on_disk, "a segment that would be written twice"
        assert self._dirty.keys() <= self._resident.keys(), "a segment to be written that is not in memory"

    @property
    def _takes_writes(self) -> bool:
        return self._disk is not None and self._disk.may_write

    def _read_disk(self, disk: DiskTier) -> None:
        for record in disk.scan():
            parent = self._tree.segments.get(record.parent_key) if record.parent_key else None
            if record.parent_key and parent is None:
                disk.remove(record.key)
                continue
            try:
                segment = self._tree.add(parent, record.start, record.tokens, record.order, is_whole=record.is_whole)
            except ValueError:  # two that begin alike, from two processes: the more recently used one is here already
                disk.remove(record.key)
                continue
            segment.is_on_disk = True

    def _rank(self, segment: Segment) -> None:
        self._uses += 1
        segment.used = self._uses
        worth = self.recompute_s(segment.start, len(segment.tokens)) / max(1, segment.size_bytes)
        segment.priority = self._clock + worth

    def _admit(self, segment: Segment, data: State) -> None:
        segment.data = data
        self.size_bytes += segment.size_bytes
        self._resident[segment.key] = segment

    def _expel(self, segment: Segment) -> None:
        self._dirty.pop(segment.key, None)
        if segment.data is not None:
            segment.data = None
            self.size_bytes -= segment.size_bytes
            del self._resident[segment.key]

    def _make_room(self, size_bytes: int, *, spare: Segment | None) -> bool:
        """Let segments leave memory until `size_bytes` fit. False if that would take `spare` or what it hangs below,
        or never could."""
        if size_bytes > self.limit_bytes:
            return False
        spared: set[bytes] = set()
        while spare is not None:
            spared.add(spare.key)
            spare = spare.parent
        while self.size_bytes + size_bytes > self.limit_bytes:
            leaves = [
                segment
                for segment in self._resident.values()
                if segment.key not in spared and all(child.data is None for child in segment.below())
            ]
            if not leaves:
                return False
            victim = min(leaves, key=lambda segment: (segment.priority, segment.used))
            self._clock = max(self._clock, victim.priority)  # one that waited for what hung below it may rank lower
            if not victim.is_on_disk and self._takes_writes:
                assert victim.data is not None
                self._write(victim, victim.data)
            if victim.is_on_disk:
                self._expel(victim)
            else:
                self.drop(victim)
        return True

    def _forget_lost(self) -> None:
        """Notice what the disk has lost. What is in memory too is written again when it leaves memory, and not before:
        a disk smaller than memory would never be done."""
        for key in self._disk.take_lost() if self._disk else ():
            segment = self._tree.segments.get(key)
            if segment is not None and segment.is_on_disk:
                segment.is_on_disk = False
                if segment.data is None:
                    self.drop(segment)

    def _write(self, segment: Segment, data: State) -> bool:
        """Hand a segment to the disk tier, after those above it: it refuses one whose parent it does not have."""
        assert self._disk is not None
        chain, parent = [(segment, data)], segment.parent
        while parent is not None and parent.data is not None and not parent.is_on_disk:
            chain.append((parent, parent.data))
            parent = parent.parent
        for each, its_data in reversed(chain):
            if not self._disk.write(each.record, its_data):
                return False
            each.is_on_disk = True
            self._dirty.pop(each.key, None)
        return True
