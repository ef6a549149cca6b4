"""Conversations are well-formed, true to what was told, and the same for the same seed."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

from tiny.corpus import conversation, repeat, stories, sums, unknown
from tiny.corpus.words import ANIMALS, CREATURES


def drawn(seed: int, n_messages: int = 60) -> list[dict[str, str]]:
    return list(islice(conversation.messages(Random(seed)), n_messages))


def test_the_same_seed_gives_the_same_conversation() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_turns_alternate_after_at_most_one_system_message() -> None:
    with_system = 0
    for seed in range(60):
        roles = [message["role"] for message in drawn(seed)]
        with_system += roles[0] == "system"
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"] * (len(turns) % 2)
    assert 0 < with_system < 60


def test_no_message_is_blank_padded_or_has_an_open_slot() -> None:
    for seed in range(60):
        for message in drawn(seed):
            assert message["content"] == message["content"].strip(" \n") != ""
            assert "{" not in message["content"].replace('{"', "").replace("{}", "")


def test_a_recalled_name_is_the_last_one_told() -> None:
    n_recalled = 0
    for seed in range(200):
        said = ""
        for message in drawn(seed):
            recalled = re.fullmatch(r"Your name is (.+)\.", message["content"])
            if message["role"] == "assistant" and recalled:
                n_recalled += 1
                assert recalled.group(1) in said
            elif message["role"] != "assistant":
                said += message["content"] + "\n"
    assert n_recalled > 50


def test_sums_are_right() -> None:
    random = Random(1)
    for _ in range(1000):
        first, second, total = map(int, re.findall(r"\d+", sums.exchange(random).assistant))
        assert 0 <= first <= 9
        assert 0 <= second <= 9
        assert first + second == total


def test_repeats_are_exact() -> None:
    random = Random(2)
    for _ in range(1000):
        turn = repeat.exchange(random)
        assert turn.assistant in turn.user
        assert 1 <= len(turn.assistant.split()) <= repeat.MAX_WORDS


def test_stories_keep_to_their_subject() -> None:
    random = Random(3)
    for held_out in (False, True):
        for _ in range(500):
            plot = stories.plot(random, held_out)
            words = re.findall(r"[a-z]+", stories.story(random, plot).lower())
            assert words.count(plot.subject) >= 3
            assert set(words).isdisjoint(set(ANIMALS + CREATURES) - {plot.subject})


def test_unknown_questions_get_a_modest_answer() -> None:
    random = Random(4)
    assert all("tiny model" in unknown.exchange(random).assistant for _ in range(500))
