"""What an over-long prompt loses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.server.prompting.ask import Message
from localrun.server.prompting.fitting import cut_messages, cut_tokens, limit_tokens


def chat(*turns: str) -> list[Message]:
    """ "u12" is a user's message of 12 characters; s and a stand for the other roles."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[0] * int(turn[1:])} for turn in turns]


class Tokenizer:
    """A token per character; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def __call__(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self.asked.append([message["content"] for message in messages])
        return tuple(ord(character) for message in messages for character in message["content"])


async def cut(messages: list[Message], limit: int) -> tuple[list[str], int]:
    tokenizer = Tokenizer()
    tokens, kept = await cut_messages(messages, tokenizer, limit=limit)
    texts = [message["content"] for message in kept]
    assert "".join(map(chr, tokens)) == "".join(texts)
    return texts, len(messages) - len(kept)


@pytest.mark.parametrize(
    ("n_ctx", "n_predict", "limit"),
    [
        (4096, -1, 4096 - 256),
        (4096, 100, 3996),
        (4096, 4000, 3072),
        (512, -1, 384),
        (512, 1, 511),
        (4, -1, 3),
        (1, -1, 0),
    ],
)
def test_room_for_the_answer(n_ctx: int, n_predict: int, limit: int) -> None:
    assert limit_tokens(n_ctx, n_predict) == limit


async def test_what_fits_stays_whole() -> None:
    messages = chat("s3", "u5", "a5", "u5")
    assert await cut(messages, 18) == (["sss", "uuuuu", "aaaaa", "uuuuu"], 0)


async def test_the_oldest_go_first_and_a_user_begins() -> None:
    messages = chat("s3", "u5", "a5", "u5", "a5", "u5")
    assert await cut(messages, 27) == (["sss", "uuuuu", "aaaaa", "uuuuu"], 2)
    assert await cut(messages, 17) == (["sss", "uuuuu"], 4)


async def test_system_messages_and_the_last_one_always_stay() -> None:
    assert await cut(chat("s3", "u5", "s4", "a5", "u50"), 20) == (["sss", "ssss", "u" * 50], 2)
    assert await cut(chat("u50"), 20) == (["u" * 50], 0)
    assert await cut(chat("s50", "u5"), 20) == (["s" * 50, "u" * 5], 0)


async def test_a_long_conversation_is_bisected() -> None:
    tokenizer = Tokenizer()
    messages = chat(*["u10", "a10"] * 500, "u10")
    tokens, kept = await cut_messages(messages, tokenizer, limit=1000)
    assert len(tokens) == 990
    assert len(messages) - len(kept) == 902
    assert len(tokenizer.asked) < 13


async def test_an_agent_s_turn_loses_its_oldest_calls_with_their_results() -> None:
    messages = chat("s3", "u5", "a5", "u5", "a1", "t9", "t9", "a1", "t9", "a1", "t9")
    question, call, result = "uuuuu", "a", "t" * 9
    whole_turn = ["sss", question, call, result, result, call, result, call, result]
    assert await cut(messages, 50) == (whole_turn, 2)
    assert await cut(messages, 40) == (["sss", question, call, result, call, result], 5)
    assert await cut(messages, 20) == (["sss", question, call, result], 7)
    assert await cut(messages, 5) == (["sss", question, call, result], 7), "too long even so"


@given(st.lists(st.tuples(st.sampled_from("suat"), st.integers(1, 30)), min_size=1, max_size=12), st.integers(0, 200))
async def test_the_longest_allowed_part_that_fits_is_taken(turns: list[tuple[str, int]], limit: int) -> None:
    messages = chat(*[f"{role}{length}" for role, length in turns])
    allowed = _allowed_parts(messages)
    fitting = [part for part in allowed if sum(map(len, part)) <= limit]
    kept, n_left_out = await cut(messages, limit)
    assert kept == (fitting or [allowed[-1]])[0]
    assert len(kept) == len(messages) - n_left_out


def _allowed_parts(messages: list[Message]) -> list[list[str]]:
    """The whole, and what is left when the oldest others go one by one, where that is a conversation: a user begins it,
    or it is the last question and calls from some call on; where there is no question, the last message alone."""
    numbered = list(enumerate(messages))
    questions = [index for index, message in numbered if message["role"] == "user"]
    parts = [[message["content"] for message in messages]]
    for start in range(1, len(messages)):
        if all(message["role"] == "system" for message in messages[:start]):
            continue
        role, last = messages[start]["role"], questions[-1] if questions else len(messages)
        is_later_call = role == "assistant" and any(
            message["role"] == "assistant" for message in messages[last + 1 : start]
        )
        if role == "user" or is_later_call or (not questions and start == len(messages) - 1):
            kept_question = last if is_later_call else None
            parts.append(
                [
                    message["content"]
                    for index, message in numbered
                    if index >= start or index == kept_question or message["role"] == "system"
                ]
            )
    return parts


@pytest.mark.parametrize(
    ("n_keep", "limit", "expected"),
    [
        (4, 20, list(range(12))),
        (4, 12, list(range(12))),
        (4, 10, [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]),
        (0, 10, [0, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (-1, 10, [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]),
        (9, 10, [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]),
        (4, 1, [11]),
        (4, 0, []),
    ],
)
def test_a_plain_prompt_keeps_its_start_and_its_end(n_keep: int, limit: int, expected: list[int]) -> None:
    assert list(cut_tokens(tuple(range(12)), limit=limit, n_keep=n_keep)) == expected
