"""The first screen is a chat with the model that was used last, else with one that is here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from localrun.last_model import last_model, remember_model
from localrun.tui.app import LocalrunApp

SIZE = (100, 30)
REAL = {"size": 640_000_000, "capabilities": ["completion"], "source": "foreign"}


@pytest.fixture
def kept(desk: Any, tmp_path: Path) -> Path:
    """The file with the last model's name, of an app whose daemon has the built-in model and two real ones."""
    path = tmp_path / "last-model"
    desk.daemon.rows = [
        {"name": "tiny", "size": 5_400_000, "capabilities": ["completion"], "source": "built-in"},
        {"name": "gemma3:4b", "modified_at": "2026-01-09"} | REAL,
        {"name": "qwen3:0.6b", "modified_at": "2026-01-08"} | REAL,
    ]
    return path


def open_app(desk: Any, path: Path) -> Any:
    """The app as it is started anew."""
    desk.app = LocalrunApp("http://127.0.0.1:1", connect=desk.daemon.connect, last_model_file=path)
    return desk.open(SIZE)


async def test_enter_asks_the_latest_model_that_is_here(desk: Any, kept: Path) -> None:
    async with open_app(desk, kept) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "This is gemma3:4b. It runs on this machine alone. F3 chooses another.")
        assert "no longer here" not in desk.seen(desk.app)
        assert last_model(kept) == "", "nothing was asked yet"
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        model, messages = desk.daemon.questions[0]
        assert (model, messages[0]["content"]) == ("gemma3:4b", "What can you help me with?")


async def test_what_answered_last_is_begun_with_and_what_was_only_chosen_is_not(desk: Any, kept: Path) -> None:
    async with open_app(desk, kept) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "This is gemma3:4b.")
        await pilot.press(*"/model qwen3:0.6b", "enter")
        await desk.see(pilot, "This is qwen3:0.6b.")
        await pilot.press(*"hello", "enter")
        desk.daemon.say("Good day.")
        await desk.see(pilot, "Good day.")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press(*"/model gemma3:4b", "enter")
        await desk.see(pilot, "gemma3:4b answers in this chat")
    async with open_app(desk, kept) as pilot:
        await desk.see(pilot, "This is qwen3:0.6b.")
        desk.daemon.publish()
        await desk.see(pilot, "● ready")
        assert "This is qwen3:0.6b." in desk.seen(desk.app)


async def test_a_model_that_is_gone_is_said_and_another_one_begun_with(desk: Any, kept: Path) -> None:
    remember_model(kept, "llama3:8b")
    async with open_app(desk, kept) as pilot:
        await desk.see(pilot, "This is llama3:8b.")
        await pilot.press(*"half a")
        desk.daemon.publish()
        await desk.see(pilot, "llama3:8b, which you used last")
        await desk.see(pilot, "This is gemma3:4b.")
        await pilot.press(*" thought", "enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        assert desk.daemon.questions[0][1][0]["content"] == "half a thought"
    assert last_model(kept) == "llama3:8b", "it has not answered yet"


@pytest.mark.parametrize("is_there", [False, True], ids=["before the daemon came", "while it is asked for its models"])
async def test_what_is_asked_early_waits_for_the_model_that_answers(desk: Any, kept: Path, is_there: bool) -> None:
    models, may_tell, is_asked = desk.daemon.models, asyncio.Event(), asyncio.Event()

    async def models_later() -> Any:
        is_asked.set()
        await may_tell.wait()
        return await models()

    desk.daemon.models = models_later
    async with open_app(desk, kept) as pilot:
        if is_there:
            desk.daemon.publish()
            await is_asked.wait()
        await pilot.press(*"hello", "enter")
        await pilot.pause()
        assert (desk.daemon.questions, desk.app.screen.prompt.text) == ([], "hello")
        if not is_there:
            desk.daemon.publish()
        may_tell.set()
        await desk.until(pilot, lambda: desk.daemon.questions)
        model, messages = desk.daemon.questions[0]
        assert (model, messages[0]["content"], desk.app.screen.prompt.text) == ("gemma3:4b", "hello", "")
        desk.daemon.say("I am Gemma.")
        await desk.see(pilot, "I am Gemma.")


async def test_what_is_asked_of_no_daemon_comes_back(desk: Any, kept: Path) -> None:
    desk.daemon.is_up = False
    async with open_app(desk, kept) as pilot:
        await pilot.press(*"hello", "enter")
        await desk.see(pilot, "The answer failed")
        await desk.until(pilot, lambda: desk.app.screen.prompt.text == "hello")
        desk.daemon.is_up = True


async def test_the_toy_answers_where_nothing_else_can(desk: Any, kept: Path) -> None:
    del desk.daemon.rows[1:]
    async with open_app(desk, kept) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "● ready")
        await desk.see(pilot, "This is tiny, the small model that comes with localrun.")
        await desk.see(pilot, "finds better ones.")
