"""Which replica computes a prompt: the rule, and what it is worth, played with caches of every size."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.cluster import affinity
from localrun.cluster.affinity import BLOCK_BYTES, BLOCK_TOKENS, Affinity, blocks

IDLE = dict.fromkeys("abcd", 0.0)


def text(seed: object, n_blocks: int) -> bytes:
    return random.Random(repr(seed)).randbytes(n_blocks * BLOCK_BYTES)


def test_prompts_have_as_many_digests_in_common_as_blocks():
    one, other = (blocks([text("system", 3), text(name, 5)]) for name in ("one", "other"))
    assert len(one) == 8
    assert [mine == yours for mine, yours in zip(one, other, strict=True)] == [True] * 3 + [False] * 5


def test_a_prompt_may_come_in_any_pieces():
    whole = text("x", 4) + b"and a rest that fills no block"
    assert blocks([whole]) == blocks([whole[:100], whole[100:700], b"", whole[700:]])
    assert len(blocks([whole])) == 4


@pytest.mark.parametrize("short", [b"", b"hello"])
def test_the_shortest_prompts_have_one(short: bytes):
    assert len(blocks([short])) == 1


def test_a_long_prompt_counts_by_its_beginning():
    assert blocks([text("x", 500)]) == blocks([text("x", 500), b"more"])
    assert len(blocks([text("x", 500)])) == affinity.MAX_BLOCKS


def test_realms_share_nothing():
    mine, yours = (blocks([text("same", 4)], realm=realm) for realm in (b"key 1", b"key 2"))
    assert not set(mine) & set(yours)
    assert not set(blocks([b"hi"], realm=b"1")) & set(blocks([b"hi"], realm=b"2"))


@given(st.integers(0, 10_000), st.sets(st.text(min_size=1, max_size=4), min_size=1, max_size=8))
def test_doors_that_have_not_talked_choose_alike(seed: int, replicas: set[str]):
    prompt = blocks([text(seed, 3)])
    forward, back = (dict.fromkeys(sorted(replicas, reverse=flag), 0.0) for flag in (False, True))
    assert Affinity().choose(prompt, forward) == Affinity().choose(prompt, back)


@given(st.integers(0, 1000))
def test_a_replica_that_goes_moves_its_share_alone(seed: int):
    prompt = blocks([text(seed, 2)])
    before = Affinity().choose(prompt, IDLE)
    left = {replica: 0.0 for replica in IDLE if replica != "c"}
    assert Affinity().choose(prompt, left) == before or before == "c"


def test_unknown_prompts_go_to_everybody():
    seen = Counter(Affinity().choose(blocks([text(seed, 2)]), IDLE) for seed in range(400))
    assert set(seen) == set(IDLE)
    assert max(seen.values()) <= 1.3 * 100


def test_a_conversation_stays_until_waiting_costs_more():
    door, prompt = Affinity(), blocks([text("conversation", 40)])
    first = door.choose(prompt, IDLE)
    door.note(prompt, first)
    longer = blocks([text("conversation", 40), text("next turn", 4)])
    assert door.choose(longer, IDLE | {first: 5.0 * BLOCK_TOKENS}) == first
    assert door.choose(longer, IDLE | {first: 40.0 * BLOCK_TOKENS}) != first


def test_who_is_gone_is_not_chosen_and_forgotten():
    door, prompt = Affinity(), blocks([text("x", 20)])
    door.note(prompt, "a")
    assert door.choose(prompt, {"b": 0.0, "c": 0.0}) in ("b", "c")
    door.forget("a")
    assert len(door) == 0
    with pytest.raises(ValueError, match="no replica"):
        door.choose(prompt, {})


def test_what_is_remembered_is_bounded_and_the_oldest_goes():
    door = Affinity(max_digests=100)
    for seed in range(50):
        door.note(blocks([text(seed, 10)]), "a")
    assert len(door) == 100
    assert door.choose(blocks([text(49, 10)]), {"a": 0.0}) == "a"
    assert door._depths(blocks([text(49, 10)]), IDLE) == {"a": 10}
    assert door._depths(blocks([text(0, 10)]), IDLE) == {}


# --- what it is worth -------------------------------------------------------------------------------------------------


class Played:
    """A replica's cache of so many blocks, oldest use first, and the tokens that it has computed."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks, self.kept, self.computed = n_blocks, OrderedDict[bytes, None](), 0
        self.cached = 0

    def compute(self, prompt: tuple[bytes, ...]) -> int:
        """How many tokens it had to compute."""
        n_cached = next((depth for depth, digest in enumerate(prompt) if digest not in self.kept), len(prompt))
        for digest in prompt:
            self.kept[digest] = None
            self.kept.move_to_end(digest)
        while len(self.kept) > self.n_blocks:
            self.kept.popitem(last=False)
        self.cached += n_cached
        self.computed += len(prompt) - n_cached
        return (len(prompt) - n_cached) * BLOCK_TOKENS


def conversations(n: int = 200, n_turns: int = 5) -> list[tuple[bytes, ...]]:
    """Prompts in the order in which they come: one system prompt, `n` conversations, interleaved at random."""
    order = random.Random("order")
    left = dict.fromkeys(range(n), 0)
    prompts = []
    while left:
        number = order.choice(list(left))
        left[number] += 1
        turns = [text((number, turn), 2) for turn in range(left[number])]
        prompts.append(blocks([text("system", 8), *turns]))
        if left[number] == n_turns:
            del left[number]
    return prompts


def play(rule: str, n_blocks: int, n_replicas: int = 4) -> tuple[int, float]:
    """Cached blocks in all, and the highest replica's tokens over the mean. Each replica computes 300 tokens between
    two arrivals, which is a load of about a half."""
    names = [f"replica {number}" for number in range(n_replicas)]
    replicas = {name: Played(n_blocks) for name in names}
    waiting = dict.fromkeys(names, 0.0)
    door, draws = Affinity(), random.Random("draws")
    for prompt in conversations():
        if rule == "affinity":
            chosen = door.choose(prompt, waiting)
            door.note(prompt, chosen)
        else:
            chosen = min(draws.sample(names, min(2, n_replicas)), key=waiting.__getitem__)
        waiting[chosen] += replicas[chosen].compute(prompt)
        waiting = {name: max(0.0, tokens - 300 / n_replicas) for name, tokens in waiting.items()}
    computed = [replica.computed for replica in replicas.values()]
    return sum(replica.cached for replica in replicas.values()), max(computed) * n_replicas / sum(computed)


@pytest.mark.parametrize("n_blocks", [4000, 600, 200])
def test_200_conversations_find_nearly_what_one_large_machine_would(n_blocks: int):
    """Caches larger than what is said, smaller, and much smaller: four replicas against one with the cells of all."""
    cached, imbalance = play("affinity", n_blocks)
    alone, _ = play("affinity", 4 * n_blocks, 1)
    two_choices, _ = play("two choices", n_blocks)
    assert cached >= 0.9 * alone
    assert cached > two_choices
    assert imbalance <= 1.3


def test_a_prompt_that_everybody_asks_for_spreads():
    door, prompt, waiting = Affinity(), blocks([text("hot", 30)]), dict(IDLE)
    seen = Counter()
    for _ in range(200):
        chosen = door.choose(prompt, waiting)
        door.note(prompt, chosen)
        seen[chosen] += 1
        waiting[chosen] += 200  # its answer
        waiting = {name: max(0.0, tokens - 50) for name, tokens in waiting.items()}
    assert max(seen.values()) <= 1.3 * 50
