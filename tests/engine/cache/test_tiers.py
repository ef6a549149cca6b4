"""The two tiers: what stays, what goes where, and what comes back after a restart or a loss."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.cache.tiers import Tiers
from localrun.engine.cache.tree import Block, PrefixKey, SavedPrefix
from tests.depth import DEPTH
from tests.engine.memory_disk import MemoryDisk

A, B, C, D, E = ([letter] * 10 for letter in b"abcde")


def saved(store: Tiers, tokens: list[int]) -> SavedPrefix:
    return store.match(PrefixKey(tokens), len(tokens)).saved()


def add(store: Tiers, path: SavedPrefix, tokens: list[int], data: bytes) -> Block | None:
    """Keep the rows of `tokens` after a path, which is what is saved of them."""
    block = store.tree.graft(path.blocks[-1] if path.pieces else None, path.n_tokens, tokens[path.n_tokens :])
    return block if store.keep(block, data) else None


def save(store: Tiers, tokens: list[int], size_bytes: int = 10) -> Block | None:
    """Keep what the store lacks of `tokens`; the bytes tell the segment."""
    path = saved(store, tokens)
    block = add(store, path, tokens, bytes([tokens[-1]]) * size_bytes)
    store.check_integrity()
    return block


def kept(store: Tiers, *prompts: list[int]) -> list[int]:
    return [saved(store, tokens).n_tokens for tokens in prompts]


def loaded(store: Tiers, tokens: list[int]) -> list[bytes | None]:
    """The bytes of each segment on the way through `tokens`; loading counts as a use."""
    path = saved(store, tokens)
    found = [store.load(block) for block in path.blocks]
    store.check_integrity()
    store.touch(path.blocks)
    return [None if data is None else bytes(data) for data in found]


def test_memory_is_never_above_its_bytes_and_the_one_unused_longest_goes():
    store = Tiers(30)
    for tokens in (A, B, C):
        save(store, tokens)
    loaded(store, A)
    save(store, D)
    assert kept(store, A, B, C, D) == [10, 0, 10, 10]
    assert (store.size_bytes, store.n_ram_entries, len(store)) == (30, 3, 3)


def test_what_is_larger_than_memory_is_not_kept_and_costs_nobody_anything():
    store = Tiers(30)
    save(store, A, 30)
    assert save(store, B, 31) is None
    assert kept(store, A, B) == [10, 0]


def test_what_is_dear_to_compute_stays_longer_but_not_for_ever():
    cost = {0: 1.0}
    store = Tiers(30, recompute_s=lambda start, n_tokens: 100.0 if n_tokens == 11 else cost[start])
    save(store, [*A, 1])
    for letter in range(200, 204):
        save(store, [letter] * 10)
    assert kept(store, [*A, 1]) == [11]
    for _ in range(25):
        for letter in range(200, 206):
            save(store, [letter] * 10) if not kept(store, [letter] * 10)[0] else loaded(store, [letter] * 10)
    cost[0] = 30.0
    for letter in range(100, 110):
        save(store, [letter] * 10)
    assert kept(store, [*A, 1]) == [0], "the clock has passed what it was worth"


def test_of_two_that_cost_the_same_to_compute_the_smaller_stays():
    store = Tiers(100)
    save(store, A, 80)
    save(store, B, 20)
    save(store, C, 20)
    assert kept(store, A, B, C) == [0, 10, 10]


def test_what_hangs_below_goes_before_what_carries_it():
    store = Tiers(30)
    save(store, A)
    save(store, A + B)
    save(store, A + B + C)
    store.touch(saved(store, A + B + C).blocks)
    save(store, D)
    assert kept(store, A + B + C, D) == [20, 10]


def test_a_branch_never_pushes_out_what_it_hangs_below():
    store = Tiers(20)
    save(store, A)
    save(store, A + B)
    assert save(store, A + B + C) is None
    assert kept(store, A + B + C) == [20]


def test_the_clock_never_goes_back():
    """A cheap segment that had to wait for a dear one below it must not make newcomers look worthless."""
    store = Tiers(20, recompute_s=lambda start, n_tokens: 1.0 if start == 0 else 50.0)
    save(store, A)
    save(store, A + B)
    save(store, C)  # in the place of what hangs below A
    save(store, D)  # in the place of A
    assert kept(store, A, C, D) == [0, 10, 10]
    save(store, E)
    save(store, A)
    assert kept(store, C, D, E, A) == [0, 0, 10, 10], "a newcomer went before what was there longer"


def test_hits_are_counted_by_tier():
    store = Tiers(20, MemoryDisk())
    for tokens in (A, B, C):
        save(store, tokens)
    assert loaded(store, A) == [b"a" * 10]
    assert (store.ram_hit_tokens, store.disk_hit_tokens) == (0, 10)
    loaded(store, A)
    assert (store.ram_hit_tokens, store.disk_hit_tokens) == (10, 10)


def test_what_leaves_memory_goes_to_disk_parents_first_and_comes_back():
    disk = MemoryDisk()
    store = Tiers(20, disk)
    save(store, A)
    save(store, A + B)
    save(store, C)
    save(store, D)
    assert [record.tokens for record in disk.scan()] == [A, B]
    assert kept(store, A + B, C, D) == [20, 10, 10]
    assert loaded(store, A + B) == [b"a" * 10, b"b" * 10]
    assert store.size_bytes == 20


def test_what_memory_cannot_hold_at_all_goes_straight_to_disk():
    disk = MemoryDisk()
    store = Tiers(0, disk)
    assert store.is_on
    save(store, A)
    save(store, A + B)
    assert (store.n_ram_entries, store.n_disk_entries, store.disk_bytes) == (0, 2, 20)
    assert loaded(store, A + B) == [b"a" * 10, b"b" * 10]
    assert store.n_ram_entries == 0


def test_an_entry_that_vanished_from_disk_is_a_miss_and_takes_what_hangs_below_with_it():
    disk = MemoryDisk()
    store = Tiers(0, disk)
    trunk = save(store, A)
    save(store, A + B)
    assert trunk is not None
    disk.data.clear()
    assert store.load(trunk) is None
    assert kept(store, A + B) == [0]
    assert disk.records == {}
    store.check_integrity()
    store.drop(trunk)


def test_a_restart_finds_everything_and_reads_it_only_when_it_is_wanted():
    disk = MemoryDisk()
    store = Tiers(100, disk)
    for tokens in (A, A + B, A + C):
        save(store, tokens)
    store.flush(1.0, time.monotonic)
    assert disk.calls == ["flush", "close"]
    again = Tiers(100, disk)
    again.check_integrity()
    assert (again.n_ram_entries, len(again), again.can_persist) == (0, 3, False)
    assert kept(again, A + B, A + C, D) == [20, 20, 0]
    assert loaded(again, A + C) == [b"a" * 10, b"c" * 10]
    assert again.size_bytes == 20


def test_a_restart_deletes_orphans_and_the_second_of_two_that_begin_alike():
    disk = MemoryDisk()
    store = Tiers(0, disk)
    for tokens in (A, A + B, C):
        save(store, tokens)
    trunk = next(record for record in disk.scan() if record.tokens == A)
    del disk.records[trunk.key], disk.data[trunk.key]
    other = MemoryDisk()
    save(Tiers(0, other), [*C[:4], *D])
    disk.records |= other.records
    disk.data |= other.data
    again = Tiers(0, disk)
    again.check_integrity()
    assert [record.tokens for record in disk.scan()] == [C]
    assert kept(again, A + B, C) == [0, 10]


def test_a_restart_keeps_salts_apart():
    disk = MemoryDisk()
    store = Tiers(100, disk)
    save(store, A)
    other = PrefixKey(A + B, b"adapter")
    parent = store.tree.graft(None, 0, A, root=other.root)
    assert store.keep(parent, b"x" * 10)
    assert store.keep(store.tree.graft(parent, 10, B), b"y" * 10)
    store.flush(1.0, time.monotonic)
    again = Tiers(100, disk)
    again.check_integrity()
    assert kept(again, A + B) == [10]
    found = again.match(other, 20).saved()
    assert found.n_tokens == 20
    assert [again.load(block) for block in found.blocks] == [b"x" * 10, b"y" * 10]
    assert again.match(PrefixKey(A, b"another"), 10).n_tokens == 0


def test_a_disk_that_refuses_writes_is_read_and_not_counted_on():
    disk = MemoryDisk()
    store = Tiers(10, disk)
    save(store, A)
    save(store, B)
    disk.may_write = False
    save(store, C)
    save(store, D)
    assert kept(store, A, B, C, D) == [10, 0, 0, 10]
    assert not store.can_persist
    assert save(store, [1] * 10, 11) is None
    disk_only = Tiers(0, disk)
    assert not disk_only.is_on
    assert loaded(disk_only, A) == [b"a" * 10]


def test_persisting_goes_one_by_one_with_parents_first_and_ends():
    disk = MemoryDisk()
    store = Tiers(100, disk)
    for tokens in (A, A + B, A + B + C, D):
        save(store, tokens)
    for n_written in range(1, 5):
        assert store.can_persist
        store.persist()
        store.check_integrity()
        assert disk.n_entries == n_written
    assert not store.can_persist
    assert store.n_ram_entries == 4


def test_without_a_disk_there_is_nothing_to_persist_and_flushing_is_no_error():
    store = Tiers(100)
    save(store, A)
    assert not store.can_persist
    store.flush(1.0, time.monotonic)
    assert not Tiers(0).is_on


def test_a_use_is_told_to_the_disk_with_the_root_as_the_latest():
    disk = MemoryDisk()
    store = Tiers(0, disk)
    trunk, branch = save(store, A), save(store, A + B)
    assert trunk is not None
    assert branch is not None
    store.touch(saved(store, A + B).blocks)
    assert disk.touched == [branch.name, trunk.name]


def tiers() -> tuple[Tiers, MemoryDisk]:
    """A and below it B in memory and on disk, C in memory alone, D on disk alone."""
    disk = MemoryDisk()
    store = Tiers(30, disk)
    save(store, D)
    for tokens in (A, A + B):
        save(store, tokens)
    while store.can_persist:
        store.persist()
    save(store, C)
    assert (store.n_ram_entries, store.n_disk_entries) == (3, 3)
    return store, disk


def test_clearing_memory_leaves_what_is_on_disk():
    store, _ = tiers()
    store.clear(ram=True, disk=False)
    store.check_integrity()
    assert kept(store, A + B, C, D) == [20, 0, 10]
    assert (store.size_bytes, store.n_ram_entries) == (0, 0)
    assert loaded(store, A + B) == [b"a" * 10, b"b" * 10]


def test_clearing_the_disk_leaves_what_is_in_memory_to_be_written_again():
    store, disk = tiers()
    store.clear(ram=False, disk=True)
    store.check_integrity()
    assert kept(store, A + B, C, D) == [20, 10, 0]
    assert disk.n_entries == 0
    store.flush(1.0, time.monotonic)
    assert disk.n_entries == 3


def test_clearing_both_leaves_nothing():
    store, disk = tiers()
    store.clear()
    store.check_integrity()
    assert (len(store), store.size_bytes, disk.n_entries, store.can_persist) == (0, 0, 0, False)


def test_the_check_notices_books_that_do_not_add_up():
    for damage in ("size_bytes", "limit_bytes"):
        store = Tiers(30)
        save(store, A)
        setattr(store, damage, 5)
        with pytest.raises(AssertionError):
            store.check_integrity()


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
acts = st.one_of(
    st.tuples(st.just("save"), prompts, st.integers(1, 12)),
    st.tuples(st.sampled_from(["load", "load", "drop", "vanish"]), prompts, st.just(0)),
    st.tuples(st.just("clear"), st.just([]), st.integers(1, 3)),
    st.tuples(st.sampled_from(["persist", "restart", "refuse"]), st.just([]), st.just(0)),
)


def content(tokens: list[int], size_bytes: int) -> bytes:
    return bytes([*tokens, 255]) * size_bytes


@given(st.lists(acts, max_size=40), st.sampled_from([0, 12, 40, 400]), st.booleans())
@settings(max_examples=100 * DEPTH)
def test_whatever_happens_the_books_are_right_and_bytes_are_those_of_their_tokens(trace, limit_bytes, has_disk):
    disk = MemoryDisk() if has_disk else None
    store = Tiers(limit_bytes, disk)
    for act, tokens, number in trace:
        path = saved(store, tokens)
        if act == "save" and path.n_tokens < len(tokens):
            add(store, path, tokens, content(tokens, number))
        elif act == "load":
            for block, _, end in path.pieces:
                data = store.load(block)
                if data is None:
                    break
                whole = [*tokens[: block.start], *block.tokens]
                assert bytes(data[: len(whole) + 1]) == bytes([*whole, 255])
                assert end <= block.end
            store.touch(path.blocks)
        elif act == "drop" and path.blocks:
            store.drop(path.blocks[0])
            assert saved(store, tokens).n_tokens == 0
        elif act == "vanish" and disk is not None and path.blocks:
            disk.remove(path.blocks[-1].name)
        elif act == "clear":
            store.clear(ram=bool(number & 1), disk=bool(number & 2))
            assert not number & 1 or store.size_bytes == 0
        elif act == "persist" and store.can_persist:
            store.persist()
        elif act == "restart" and disk is not None:
            store.flush(1.0, time.monotonic)
            assert not store.can_persist
            store = Tiers(limit_bytes, disk)
        elif act == "refuse" and disk is not None:
            disk.may_write = not disk.may_write
        store.check_integrity()
