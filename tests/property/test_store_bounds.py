"""A long life with tiny budgets: what is kept in the tree, in memory and on disk is as much after many requests as
after the first ones, whatever is dropped, lost or cancelled on the way."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from localrun.engine.backend import MemoryKind, State
from localrun.engine.cache.tree import DiskRecord, PrefixKey
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_output
from tests.engine.memory_disk import MemoryDisk
from tests.fakes.tokens import IM_END

N_CELLS = 512
RAM_BYTES, DISK_BYTES = 3_000, 12_000
N_CHATS = 6
# Short here; the bounds hold after 20,000 as well.
N_REQUESTS = 400 * DEPTH
# The first part shows how much is kept; later it may be this much more, since prompts differ.
FIRST_PART, SLACK = 5, 1.25


class MoodyDisk(MemoryDisk):
    """Refuses some writes, and loses some entries."""

    def __init__(self, rng: Random) -> None:
        super().__init__(DISK_BYTES)
        self._rng = rng

    def write(self, record: DiskRecord, data: State) -> bool:
        if self._rng.random() < 0.05:
            return False
        is_written = super().write(record, data)
        if self._rng.random() < 0.05:
            self.lose(self._rng.choice([*self.data, record.key]))
        return is_written


class Life(Harness):
    """Chats that go on, are edited, cancelled and replaced. The books are checked when nothing runs."""

    def __init__(self, rng: Random, **shape: Any) -> None:
        self.disk = MoodyDisk(rng)
        super().__init__(n_cells=N_CELLS, n_batch=64, ram_cache_bytes=RAM_BYTES, disk=self.disk, **shape)
        self.engine.cache.tiers.recompute_s = lambda start, n_tokens: n_tokens * 1e-2
        self.n_requests = 0
        self._rng = rng
        self._chats = [self._opening() for _ in range(N_CHATS)]

    def check(self) -> None:
        if not self.engine.scheduler.running:
            super().check()

    def live(self, n_requests: int) -> dict[str, int]:
        """Serve so many more requests. Returns the most that was kept of each kind, whenever nothing ran."""
        most: dict[str, int] = {}
        last = self.n_requests + n_requests
        while self.n_requests < last:
            self._serve(self._rng.sample(range(N_CHATS), self._rng.randint(1, 4)))
            for name, count in self._kept().items():
                most[name] = max(most.get(name, 0), count)
        return most

    def _serve(self, chats: list[int]) -> None:
        asked = {}
        for chat in chats:
            prompt = self._chats[chat]
            if len(prompt) > N_CELLS // 3:
                prompt = self._opening()
            elif self._rng.random() < 0.2:
                prompt = prompt[: -self._rng.randint(1, 8)]
            asked[self.n_requests] = (chat, prompt)
            self.submit(self.n_requests, prompt, n_predict=self._rng.randint(1, 40))
            self.n_requests += 1
        for _ in range(self._rng.choice([0, 0, 0, 3])):
            self.step()
        if self._rng.random() < 0.1:
            self.engine.cancel(next(iter(asked)))
        self.run()
        for request_id, (chat, prompt) in asked.items():
            output = self.tokens.get(request_id, [])
            assert output == expected_output(prompt, len(output))
            self._chats[chat] = [*prompt, *output, IM_END, *self._rng.randbytes(self._rng.randint(10, 40)), IM_END]
        for news in (self.steps, self.tokens, self.texts, self.logprobs, self.finals):
            news.clear()

    def _opening(self) -> list[int]:
        system = bytes([65 + self._rng.randrange(3)]) * 60
        return [*system, IM_END, *self._rng.randbytes(self._rng.randint(5, 60)), IM_END]

    def _kept(self) -> dict[str, int]:
        store = self.engine.cache.tiers
        return {
            "in the tree": len(store),
            "in memory": store.n_ram_entries,
            "on disk": store.n_disk_entries,
            "records": len(self.disk.records),
            "tokens in blocks": sum(block.n_tokens for block in store.tree.blocks.values()),
            "nodes": store.tree.n_nodes,
            "in the heap": len(store._leaves),
        }


def live_long(kind: MemoryKind, n_requests: int, *, is_split: bool = False) -> None:
    life = Life(Random(f"{kind} {is_split}"), memory_kind=kind, is_split=is_split, n_background_seqs=2)
    first = life.live(n_requests // FIRST_PART)
    later = life.live(n_requests - n_requests // FIRST_PART)
    for name, count in later.items():
        assert count <= SLACK * first[name], f"more and more {name}"
    store = life.engine.cache.tiers
    store.match(PrefixKey([]), 0)
    assert len(store) <= store.n_ram_entries + store.n_disk_entries
    assert store.ram_hit_tokens > 0
    assert store.disk_hit_tokens > 0


@pytest.mark.parametrize("kind", MemoryKind)
def test_what_is_kept_does_not_grow_with_the_requests(kind: MemoryKind):
    live_long(kind, N_REQUESTS)


def test_nor_does_it_where_streams_are_split():
    live_long(MemoryKind.ATTENTION, N_REQUESTS, is_split=True)
