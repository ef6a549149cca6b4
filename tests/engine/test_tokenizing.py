"""Texts in threads: what is delivered, in which order, and what is not any more."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from localrun.engine.pipes import LONG_CHARACTERS, Text, TokenizerThreads
from localrun.errors import QueueFull

PATIENCE_S = 60


@pytest.fixture
def tokenizing() -> Iterator[TokenizerThreads]:
    tokenizing = TokenizerThreads(max_texts=1000)
    yield tokenizing
    assert tokenizing.close(PATIENCE_S)


def test_every_text_is_delivered_or_dropped_and_those_of_a_client_in_order(tokenizing: TokenizerThreads):
    chance = random.Random(5)
    delivered: list[tuple[str, int]] = []
    is_last_there = threading.Event()
    dropped: set[int] = set()
    for at in range(600):
        client = chance.choice("abc")
        length = chance.choice([1, LONG_CHARACTERS])
        tokenizing.put(
            Text(at, client, length, lambda at=at: at, lambda at, client=client: delivered.append((client, at)))
        )
        victim = chance.randrange(at + 1)
        if chance.random() < 0.5 and tokenizing.drop(victim):
            assert victim not in dropped, "dropped twice"
            dropped.add(victim)
    for client in "abc":  # behind all others of this client
        tokenizing.put(Text(1000, client, 1, lambda: 1000, lambda at, client=client: delivered.append((client, at))))
    tokenizing.put(Text(1001, "end", 1, lambda: None, lambda _: is_last_there.set()))
    assert is_last_there.wait(PATIENCE_S)
    while len({client for client, at in delivered if at == 1000}) < 3:
        is_last_there.wait(0.001)
    found = [at for _, at in delivered if at < 1000]
    assert sorted([*found, *dropped]) == list(range(600))
    for client in "abc":
        own = [at for whose, at in delivered if whose == client]
        assert own == sorted(own)


def test_what_was_delivered_or_is_unknown_cannot_be_dropped(tokenizing: TokenizerThreads):
    is_there = threading.Event()
    tokenizing.put(Text(1, "a", 1, lambda: None, lambda _: is_there.set()))
    assert is_there.wait(PATIENCE_S)
    assert not tokenizing.drop(1)
    assert not tokenizing.drop(2)


def test_clients_take_turns(tokenizing: TokenizerThreads):
    """The backlog of one is no reason for another to wait for all of it."""
    may_read, is_reading, is_over = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def read() -> None:
        is_reading.set()
        may_read.wait()

    tokenizing.put(Text(0, "a", 1, read, lambda _: None))
    assert is_reading.wait(PATIENCE_S)
    for at in range(1, 10):
        tokenizing.put(Text(at, "a", 1, lambda: "a", order.append))
    tokenizing.put(Text(10, "b", 1, lambda: "b", order.append))
    tokenizing.put(Text(11, "a", 1, lambda: None, lambda _: is_over.set()))
    may_read.set()
    assert is_over.wait(PATIENCE_S)
    assert order.index("b") <= 1


def test_nothing_is_delivered_after_the_end_and_a_text_that_is_being_read_keeps_it_from_being_one():
    tokenizing = TokenizerThreads(max_texts=2)
    may_read, is_reading = threading.Event(), threading.Event()
    delivered: list[None] = []

    def read() -> None:
        is_reading.set()
        may_read.wait()

    tokenizing.put(Text(1, "a", 1, read, delivered.append))
    tokenizing.put(Text(2, "a", 1, lambda: None, delivered.append))
    with pytest.raises(QueueFull):
        tokenizing.put(Text(3, "b", 1, lambda: None, delivered.append))
    assert is_reading.wait(PATIENCE_S)
    assert not tokenizing.close(0.0)
    may_read.set()
    assert tokenizing.close(PATIENCE_S)
    assert delivered == []
