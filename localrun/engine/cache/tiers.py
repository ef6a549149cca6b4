"""What cells, memory and disk may hold, and what leaves them when they are full.

Owner: the engine's main thread. Three budgets:

* **Cells** hold *parked* sequences, which finished requests left. The one parked first goes first.
* **Memory** holds blocks within `limit_bytes`. When it is full, the block with the lowest *rank* leaves, to disk if
  there is one. The rank is recompute seconds per byte on top of a clock, and the clock rises to the rank of the block
  that left last. So blocks that are expensive to compute stay longer, and blocks that have not been used for long sink
  whatever they cost (GreedyDual-Size: Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997). A block leaves
  memory only after those below it.
* **Disk** holds files of all models, and evicts by itself (`disk.py`). It is written when a block leaves memory, when
  the engine has nothing else to do (`persist`), and at the end (`flush`), but never in the way of a step. What it loses
  meanwhile leaves the tree too, unless its bytes are in memory.

Invariant: `size_bytes`, the bytes in memory, is never above `limit_bytes`.
Does not: make or cut states (`cache.py`), or know what computing costs: it asks `recompute_s`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from localrun.engine.backend import State
from localrun.engine.cache.tree import Block, DiskRecord, Path, PrefixKey, Tree

_MEMORY = 0.2  # weight of the latest measurement
# For fewer tokens a copy costs more than it saves.
GAIN_TOKENS = 16


class DiskTier(Protocol):
    """Saved blocks of one model on disk. Nothing here raises because of a file: what cannot be read is a miss.

    `limit_bytes` bounds all models together. `size_bytes` and `n_entries` are of this model's folder, including what is
    still being written. `may_write` stays False once the disk has refused a write (full, no permission). `lost` is not
    empty while `take_lost` may have something to say.
    """

    @property
    def limit_bytes(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def n_entries(self) -> int: ...

    @property
    def may_write(self) -> bool: ...

    @property
    def lost(self) -> Sequence[bytes]: ...

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


class Cost:
    """The duration of an operation in seconds, as a moving average; 0 before the first measurement."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def note(self, seconds: float) -> None:
        """Add a measurement."""
        self.seconds = seconds if self.seconds == 0.0 else self.seconds + _MEMORY * (seconds - self.seconds)

    def fade(self) -> None:
        """The operation was avoided; lower its cost, so that it is tried again sooner or later."""
        self.seconds *= 1 - _MEMORY


class Tiers:
    """See the module. `recompute_s(start, n_tokens)` is how long computing these tokens would take.

    `parked` are the sequences kept in cells, least recently used first. `unsaved` are those of them that must be saved,
    with the number of rows placed when they were parked. `save` and `restore` are costs per token. `ram_hit_tokens` and
    `disk_hit_tokens` count the tokens that loads spared.
    """

    def __init__(
        self,
        limit_bytes: int,
        disk: DiskTier | None = None,
        recompute_s: Callable[[int, int], float] = lambda start, n_tokens: n_tokens * 1e-3,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.recompute_s = recompute_s
        self.tree = Tree()
        self.parked: OrderedDict[int, None] = OrderedDict()
        self.unsaved: dict[int, int] = {}
        self.save, self.restore = Cost(), Cost()
        self.size_bytes = 0
        self.n_ram_entries = 0
        self.ram_hit_tokens = 0
        self.disk_hit_tokens = 0
        self._disk = disk
        self._dirty: dict[bytes, Block] = {}
        self._leaves: list[tuple[float, int, bytes]] = []  # a heap, with stale entries
        self._clock = 0.0
        self._uses = 0
        if disk is not None:
            self._read_disk(disk)

    def __len__(self) -> int:
        return len(self.tree.blocks)

    @property
    def is_on(self) -> bool:
        """Whether anything can be kept outside the cells."""
        return self.limit_bytes > 0 or self._takes_writes

    @property
    def most_bytes(self) -> int:
        """The most bytes that one prompt can take."""
        return max(self.limit_bytes, self._disk.limit_bytes if self._disk and self._takes_writes else 0)

    @property
    def disk_bytes(self) -> int:
        return self._disk.size_bytes if self._disk else 0

    @property
    def n_disk_entries(self) -> int:
        return self._disk.n_entries if self._disk else 0

    @property
    def can_persist(self) -> bool:
        """Whether `persist` has something to do."""
        return bool(self._dirty) and self._takes_writes and not self.is_held_up

    @property
    def is_held_up(self) -> bool:
        """Whether writes are pending because the disk is slow. Nothing is called when it catches up, so poll."""
        return bool(self._dirty) and self._takes_writes and bool(self._disk and self._disk.is_behind)

    @property
    def copy_s_per_token(self) -> float:
        """Seconds for saving and restoring a token; 0 before the first measurement."""
        return self.save.seconds + self.restore.seconds

    def is_worth_saving(self, n_tokens: int) -> bool:
        """Whether restoring a copy would be faster than computing."""
        return (
            self.is_on and n_tokens >= GAIN_TOKENS and self.recompute_s(0, n_tokens) > n_tokens * self.copy_s_per_token
        )

    def passed_over(self, n_tokens: int) -> None:
        """So many tokens were not worth saving. What a copy costs fades, so that one slow copy does not rule out all
        later ones."""
        if n_tokens >= GAIN_TOKENS:
            self.save.fade()
            self.restore.fade()

    # --- cells ---------------------------------------------------------------------------------------------------

    def park(self, seq: int, n_placed: int | None) -> None:
        """Keep a sequence in its cells; with `n_placed` if it must be saved."""
        self.parked[seq] = None
        if n_placed is not None:
            self.unsaved[seq] = n_placed

    def unpark(self, seq: int) -> None:
        """A sequence is no longer kept."""
        del self.parked[seq]
        self.unsaved.pop(seq, None)

    # --- memory and disk -----------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, limit: int) -> Path:
        """What is kept of `key.tokens[:limit]`, in any tier. Use the result before the tree changes."""
        self._forget_lost()
        return self.tree.match(key, limit)

    def keep(self, block: Block, data: State) -> bool:
        """Keep the bytes of a new block. False if they fit nowhere; the block is then removed again."""
        block.n_bytes = len(data)
        self._rank(block)
        if self._make_room(block.n_bytes, spare=block.parent):
            self._admit(block, data)
            self._dirty[block.name] = block
        elif not self._takes_writes or not self._write(block, data):
            self.drop(block)
            return False
        return True

    def load(self, block: Block) -> State | None:
        """The bytes of a block, from disk if need be. None if they are gone; the block is then removed."""
        if block.data is not None:
            self.ram_hit_tokens += block.n_tokens
            return block.data
        is_known = self.tree.blocks.get(block.name) is block  # another block may have its name by now
        data = self._disk.read(block.name) if self._disk and is_known else None
        if data is None:
            self.drop(block)
            return None
        self.disk_hit_tokens += block.n_tokens
        block.n_bytes = len(data)
        if self._make_room(len(data), spare=block.parent):
            self._admit(block, data)
        return data

    def touch(self, blocks: Iterable[Block]) -> None:
        """Note that the blocks of a path, given from its beginning, were used now."""
        for block in reversed(list(blocks)):  # the first one last, so that on disk it is always newer than its children
            self._rank(block)
            if self._disk and block.is_on_disk:
                self._disk.touch(block.name)

    def drop(self, block: Block) -> None:
        """Forget a block and everything below it, in both tiers. No error if it is gone already."""
        if self.tree.blocks.get(block.name) is not block:
            return
        for gone in self.tree.detach(block):
            self._expel(gone)
            if self._disk and gone.is_on_disk:
                self._disk.remove(gone.name)

    def clear(self, *, ram: bool = True, disk: bool = True) -> None:
        """Forget everything in memory, on disk, or both. What only one tier loses stays in the other."""
        for block in list(self.tree.blocks.values()):
            if self.tree.blocks.get(block.name) is not block:
                continue  # went with its parent
            if disk and block.is_on_disk:
                block.is_on_disk = False
                if block.data is not None:
                    self._dirty[block.name] = block
            if ram and block.is_on_disk:
                self._expel(block)
            elif ram or block.data is None:
                self.drop(block)
        if disk and self._disk:
            self._disk.clear()

    def persist(self) -> None:
        """Hand one block that is only in memory to the disk tier, parents first."""
        self._forget_lost()
        block = next(iter(self._dirty.values()), None)
        if block is None:
            return
        while block.parent is not None and block.parent.name in self._dirty:
            block = block.parent
        assert block.data is not None
        if not self._write(block, block.data) and not (self._disk and self._disk.is_behind):
            del self._dirty[block.name]  # not tried again until it leaves memory

    def flush(self, deadline_s: float, clock: Callable[[], float]) -> None:
        """At the end: write what is only in memory, and wait for it at most `deadline_s` by `clock`."""
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
        self.tree.check_integrity()
        resident = [block for block in self.tree.blocks.values() if block.data is not None]
        assert len(resident) == self.n_ram_entries, "blocks in memory differ from those counted"
        assert self.size_bytes == sum(block.n_bytes for block in resident), "size_bytes is wrong"
        assert self.size_bytes <= self.limit_bytes, "over the limit"
        heap = set(self._leaves)
        for block in self.tree.blocks.values():
            assert block.data is not None or block.is_on_disk, "a block without bytes anywhere"
            assert block.n_below == sum(child.data is not None for child in block.children), "n_below is wrong"
            can_leave = block.data is not None and block.n_below == 0
            assert not can_leave or (*block.rank, block.name) in heap, "a block that could never leave memory"
        assert all(block.data is not None and not block.is_on_disk for block in self._dirty.values()), "written twice"
        assert self._dirty.keys() <= self.tree.blocks.keys(), "a block to be written that is gone"
        assert self.unsaved.keys() <= self.parked.keys(), "a sequence is to be saved that is not parked"

    @property
    def _takes_writes(self) -> bool:
        return self._disk is not None and self._disk.may_write

    def _read_disk(self, disk: DiskTier) -> None:
        blocks = self.tree.blocks
        for record in disk.scan():
            try:
                if record.is_whole:
                    block = self.tree.graft_state(record.tokens, root=record.root)
                else:
                    parent = blocks[record.parent_key] if record.parent_key else None
                    block = self.tree.graft(parent, record.start, record.tokens, root=record.root)
            except (KeyError, ValueError):  # two that begin alike, from two processes: the last used came first
                disk.remove(record.key)
                continue
            block.is_on_disk = True

    def _rank(self, block: Block) -> None:
        self._uses += 1
        worth = self.recompute_s(block.start, block.n_tokens) / max(1, block.n_bytes)
        block.rank = (self._clock + worth, self._uses)
        self._push(block)

    def _push(self, block: Block) -> None:
        """Add a block to the heap if it can leave memory now."""
        if block.data is None or block.n_below:
            return
        heappush(self._leaves, (*block.rank, block.name))
        if len(self._leaves) > 4 * self.n_ram_entries + 64:
            self._leaves = list({entry for entry in self._leaves if self._leaving(entry)})
            heapify(self._leaves)

    def _leaving(self, entry: tuple[float, int, bytes]) -> Block | None:
        """The block of a heap entry; None if the entry is stale."""
        block = self.tree.blocks.get(entry[2])
        can_leave = block is not None and block.data is not None and not block.n_below and block.rank == entry[:2]
        return block if can_leave else None

    def _admit(self, block: Block, data: State) -> None:
        block.data = data
        self.size_bytes += block.n_bytes
        self.n_ram_entries += 1
        if block.parent is not None:
            block.parent.n_below += 1
        self._push(block)

    def _expel(self, block: Block) -> None:
        self._dirty.pop(block.name, None)
        if block.data is None:
            return
        block.data = None
        self.size_bytes -= block.n_bytes
        self.n_ram_entries -= 1
        if block.parent is not None:
            block.parent.n_below -= 1
            if block.parent.name in self.tree.blocks:
                self._push(block.parent)

    def _make_room(self, n_bytes: int, *, spare: Block | None) -> bool:
        """Evict blocks from memory until `n_bytes` fit. False if they never can, or only without `spare` or the blocks
        above it."""
        if n_bytes > self.limit_bytes:
            return False
        spared = set()
        while spare is not None:
            spared.add(spare)
            spare = spare.parent
        aside = []
        while self.size_bytes + n_bytes > self.limit_bytes and self._leaves:
            entry = heappop(self._leaves)
            victim = self._leaving(entry)
            if victim is None:
                continue
            if victim in spared:
                aside.append(entry)
                continue
            self._clock = max(self._clock, victim.rank[0])  # one that waited for its children may rank lower
            if not victim.is_on_disk and self._takes_writes:
                assert victim.data is not None
                self._write(victim, victim.data)
            if victim.is_on_disk:
                self._expel(victim)
            else:
                self.drop(victim)
        for entry in aside:
            heappush(self._leaves, entry)
        return self.size_bytes + n_bytes <= self.limit_bytes

    def _forget_lost(self) -> None:
        """Take note of what the disk has lost. Blocks that are in memory too are written again only when they leave
        memory; otherwise a disk smaller than memory would be written forever."""
        for name in self._disk.take_lost() if self._disk and self._disk.lost else ():
            block = self.tree.blocks.get(name)
            if block is not None and block.is_on_disk:
                block.is_on_disk = False
                if block.data is None:
                    self.drop(block)

    def _write(self, block: Block, data: State) -> bool:
        """Hand a block to the disk tier, after the blocks above it: the disk refuses a block without its parent."""
        assert self._disk is not None
        chain, parent = [(block, data)], block.parent
        while parent is not None and parent.data is not None and not parent.is_on_disk:
            chain.append((parent, parent.data))
            parent = parent.parent
        for each, its_data in reversed(chain):
            if not self._disk.write(each.record, its_data):
                return False
            each.is_on_disk = True
            self._dirty.pop(each.name, None)
        return True
