"""What the disk tier loses, by its bound, by a failed write or by another process, leaves the store's tree as well."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from localrun import kv_folders
from localrun.engine.cache import disk as kv_disk
from localrun.engine.cache.disk import KvDisk
from localrun.engine.cache.tiers import Tiers
from localrun.engine.cache.tree import Block, PrefixKey, SavedPrefix
from tests.engine.disk_harness import flushed, tier
from tests.engine.memory_disk import MemoryDisk

DATA = bytes(4000)
A, B, C = ([letter] * 10 for letter in b"abc")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def prompt(number: int) -> list[int]:
    return [number] * 20


def saved(store: Tiers, tokens: list[int]) -> SavedPrefix:
    return store.match(PrefixKey(tokens), len(tokens)).saved()


def add(store: Tiers, path: SavedPrefix, tokens: list[int], data: bytes) -> Block | None:
    """Keep the rows of `tokens` after a path, which is what is saved of them."""
    block = store.tree.graft(path.blocks[-1] if path.pieces else None, path.n_tokens, tokens[path.n_tokens :])
    return block if store.keep(block, data) else None


def save(store: Tiers, tokens: list[int], data: bytes = DATA) -> bool:
    path = saved(store, tokens)
    is_kept = add(store, path, tokens, data) is not None
    store.check_integrity()
    return is_kept


def n_matched(store: Tiers, *prompts: list[int]) -> list[int]:
    return [saved(store, tokens).n_tokens for tokens in prompts]


def assert_no_false_hits(store: Tiers, disk: KvDisk, n_prompts: int) -> None:
    saved(store, [])
    store.check_integrity()
    assert len(store) == disk.n_entries
    for number in range(n_prompts):
        for block in saved(store, prompt(number)).blocks:
            assert store.load(block) == DATA


@pytest.mark.parametrize("ram_bytes", [0, 10 * len(DATA)])
def test_what_the_bound_evicts_is_no_hit_and_no_memory(root: Path, ram_bytes: int):
    disk = tier(root, limit_bytes=100 * len(DATA))
    store = Tiers(ram_bytes, disk)
    for number in range(1000):
        save(store, prompt(number))
        if number % 50 == 49:
            flushed(disk)
            assert len(store) <= 100 + 50 + 10
    store.clear(ram=True, disk=False)
    flushed(disk)
    assert_no_false_hits(store, disk, 1000)
    assert 0 < len(store) <= 100
    disk.close()


def test_what_a_busy_disk_drops_is_no_hit(root: Path, monkeypatch: pytest.MonkeyPatch):
    go, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: go.wait(10.0) and fsync(descriptor))
    monkeypatch.setattr(kv_disk, "BACKLOG_BYTES", 3 * len(DATA))
    disk = tier(root)
    store = Tiers(0, disk)
    assert [save(store, prompt(number)) for number in range(10)] == [True] * 3 + [False] * 7
    go.set()
    flushed(disk)
    assert_no_false_hits(store, disk, 10)
    assert len(store) == 3
    disk.close()


def test_what_could_not_be_written_after_all_is_no_hit(root: Path, monkeypatch: pytest.MonkeyPatch):
    disk = tier(root)
    store = Tiers(0, disk)
    save(store, prompt(0))
    flushed(disk)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space")))
    assert save(store, prompt(1))
    flushed(disk)
    assert_no_false_hits(store, disk, 2)
    assert n_matched(store, prompt(0), prompt(1)) == [20, 0]
    assert not save(store, prompt(2))
    disk.close()


def test_what_another_process_evicts_is_noticed_by_the_next_survey(root: Path):
    disk = tier(root, limit_bytes=50 * len(DATA))
    store = Tiers(0, disk)
    for number in range(40):
        save(store, prompt(number))
    flushed(disk)
    for file in list(kv_folders.saved_files(disk.folder))[:30]:
        file.path.unlink()
    for number in range(40, 60):
        save(store, prompt(number))
        flushed(disk)
    assert_no_false_hits(store, disk, 60)
    assert len(store) <= 40
    disk.close()


def test_what_is_in_memory_too_stays_and_is_written_again_when_it_leaves():
    disk = MemoryDisk(limit_bytes=25)
    store = Tiers(30, disk)
    for tokens in (A, B, C):
        save(store, tokens, bytes(10))
    n_written = 0
    while store.can_persist:
        store.persist()
        n_written += 1
        store.check_integrity()
    assert n_written == 3, "a disk smaller than memory is written once"
    assert n_matched(store, A, B, C) == [10, 10, 10]
    store.clear(ram=False, disk=True)
    for letter in b"xyz":
        save(store, [letter] * 10, bytes(10))
    assert n_matched(store, B, C) == [10, 10]
    assert [store.load(saved(store, tokens).blocks[0]) for tokens in (B, C)] == [bytes(10)] * 2


def test_a_lost_beginning_takes_along_what_nobody_can_reach_without_it():
    disk = MemoryDisk()
    store = Tiers(0, disk)
    for tokens in (A, A + B, A + B + C):
        save(store, tokens, bytes(10))
    branch = saved(store, A + B).blocks[1]
    disk.lose(branch.name)
    assert n_matched(store, A + B + C) == [10]
    store.check_integrity()
    assert disk.n_entries == 1


def test_what_was_lost_and_saved_again_since_is_there():
    disk = MemoryDisk()
    store = Tiers(0, disk)
    save(store, A, bytes(10))
    block = saved(store, A).blocks[0]
    disk.lose(block.name)
    store.drop(block)
    save(store, A, bytes(10))
    assert n_matched(store, A) == [10]
    assert store.load(block) is None, "a segment that was forgotten has no bytes, whoever has its key now"
    store.check_integrity()


def test_flushing_ends_though_the_disk_takes_nothing(root: Path):
    disk = tier(root, limit_bytes=1000)
    store = Tiers(100 * len(DATA), disk)
    for number in range(5):
        save(store, prompt(number))
    store.flush(60.0, time.monotonic)
    assert disk.n_entries == 0
    assert n_matched(store, prompt(4)) == [20]
    store.check_integrity()
