"""Several people talk to the built-in model at once, and nobody gets another's answers."""

from __future__ import annotations

import asyncio
from typing import Any

from localrun.client import Client
from tests.daemon import Daemon

# As many as the daemon finds good.
THREADS = "0"
# None of these is in the text that the model was trained on; the recipe keeps a list of its own.
NAMES = ("Zorvane", "Tibelka", "Orsimund", "Quelbray", "Haxolin", "Vemirra", "Dwinteo", "Plorana")


async def _say(client: Client, messages: list[dict[str, Any]], text: str) -> str:
    messages.append({"role": "user", "content": text})
    pieces = [piece.text async for piece in client.chat("tiny", messages, options={"temperature": 0})]
    messages.append({"role": "assistant", "content": "".join(pieces)})
    return "".join(pieces)


async def _converse(client: Client, name: str) -> str:
    messages: list[dict[str, Any]] = []
    await _say(client, messages, f"Hi, my name is {name}.")
    await _say(client, messages, "Tell me a story about a fox.")
    return await _say(client, messages, "What is my name?")


async def _until_several_run(client: Client) -> None:
    async for snapshot in client.events(hz=10):
        if snapshot.aggregate.running > 1:
            return


def test_eight_conversations_at_once_each_recall_their_own_name(daemon: Daemon) -> None:
    async def scene() -> list[str]:
        async with Client(daemon.url, name="people") as client, Client(daemon.url, name="watcher") as watcher:
            await client.load("tiny")
            watching = asyncio.create_task(_until_several_run(watcher))
            answers: list[str] = []
            async with asyncio.timeout(300):
                while not watching.done():  # a quick machine is done between two looks
                    answers = await asyncio.gather(*(_converse(client, name) for name in NAMES))
            return answers

    answers = asyncio.run(scene())
    for name, answer in zip(NAMES, answers, strict=True):
        assert name in answer
        assert not any(other in answer for other in NAMES if other != name)


def test_a_conversation_that_goes_on_computes_only_the_new_turn(daemon: Daemon) -> None:
    async def scene() -> tuple[int, int]:
        async with Client(daemon.url) as client:
            messages: list[dict[str, Any]] = []
            await _say(client, messages, "Hello there! My dog is called Bruno.")
            messages.append({"role": "user", "content": "What is 3 + 4?"})
            pieces = [piece async for piece in client.chat("tiny", messages, options={"temperature": 0})]
            metrics = pieces[-1].metrics
            assert metrics is not None
            return metrics.prompt_tokens, metrics.cached_tokens

    prompt_tokens, cached_tokens = asyncio.run(scene())
    assert cached_tokens > 0.5 * prompt_tokens
