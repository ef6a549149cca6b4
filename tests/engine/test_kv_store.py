from __future__ import annotations

import numpy as np
import pytest

from localrun.engine.kv_store import KvStore, SavedState


def state(size_bytes: int) -> SavedState:
    """A state whose bytes and order add up to `size_bytes`, which is a multiple of 4."""
    return SavedState(bytearray(size_bytes - 4), np.zeros(1, np.int32))


def test_the_least_recently_used_states_make_room():
    store = KvStore(100)
    first, second, third = (store.put(state(32))[0] for _ in range(3))
    store.get(first)
    fourth, evicted = store.put(state(60))
    assert evicted == [second, third]
    assert len(store) == 2
    assert store.size_bytes == 92
    assert store.get(first).size_bytes == 32
    assert store.get(fourth).size_bytes == 60
    with pytest.raises(KeyError):
        store.get(second)
    store.check_integrity()


def test_a_state_may_fill_the_store_but_not_more():
    store = KvStore(64)
    entry, evicted = store.put(state(64))
    assert evicted == []
    with pytest.raises(ValueError, match="68 bytes in a store of 64"):
        store.put(state(68))
    assert store.get(entry).size_bytes == 64


def test_a_dropped_entry_gives_its_bytes_back_and_its_number_never_again():
    store = KvStore(64)
    entry, _ = store.put(state(40))
    store.drop(entry)
    assert (len(store), store.size_bytes) == (0, 0)
    assert store.put(state(40))[0] != entry
    with pytest.raises(KeyError):
        store.drop(entry)


def test_the_check_notices_sizes_that_do_not_add_up():
    store = KvStore(64)
    store.put(state(40))
    store.size_bytes = 36
    with pytest.raises(AssertionError):
        store.check_integrity()
