"""The model picker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localrun.tui.widgets.prompt import Prompt

SIZE = (100, 30)


async def test_choosing_a_model_switches_the_chat_and_keeps_the_other_conversation(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await pilot.press(*"one", "enter")
        desk.daemon.say("said by tiny")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press(*"draft", "ctrl+o")
        await desk.see(pilot, "› tiny")
        await desk.see(pilot, "loaded")
        await pilot.press(*"qwen", "enter")
        await desk.see(pilot, "This is qwen3:0.6b.")
        assert "said by tiny" not in desk.seen(desk.app)
        assert desk.app.screen.query_one(Prompt).text == "draft"
        await pilot.press("enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert desk.daemon.questions[1] == ("qwen3:0.6b", [{"role": "user", "content": "draft"}])
        await pilot.press("f3")
        await desk.see(pilot, "Enter chooses")
        await pilot.press(*"tiny", "enter")
        await desk.see(pilot, "said by tiny")


async def test_arrows_choose_and_escape_does_not(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press("escape")
        await desk.until(pilot, lambda: "Enter chooses" not in desk.seen(desk.app))
        assert desk.app.session.model == "tiny"
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press("down", "enter")
        await desk.until(pilot, lambda: desk.app.session.model == "qwen3:0.6b")


async def test_a_path_is_offered_as_an_absolute_path(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press(*"./my.gguf")
        await desk.see(pilot, "file /")
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.app.session.model == str(Path("my.gguf").absolute()))


async def test_nothing_found_and_no_daemon(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press(*"zzz")
        await desk.see(pilot, "No model has this in its name.")
        await pilot.press("enter", "escape")
        desk.daemon.is_up = False
        await pilot.press("f3")
        await desk.see(pilot, "no daemon answers")


async def test_an_answer_goes_on_while_another_model_is_looked_at(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("first half, ")
        await desk.see(pilot, "first half,")
        await pilot.press("f3")
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press("down", "enter")
        await desk.see(pilot, "This is qwen3:0.6b.")
        desk.daemon.say("second half")
        desk.daemon.end_answer()
        await pilot.press("f3")
        await desk.see(pilot, "Enter chooses")
        await pilot.press(*"tiny", "enter")
        await desk.see(pilot, "first half, second half")
        await desk.see(pilot, "● done")
