"""The first screen offers the chat models that are on this machine beside the built-in one."""

from __future__ import annotations

from typing import Any

from localrun.errors import ModelNotFound

SIZE = (100, 30)


def have(desk: Any, *names: str, **changes: Any) -> None:
    """The daemon has the built-in model, and these: all of them made to chat, the later ones older."""
    desk.daemon.rows = [{"name": "tiny", "size": 5_400_000, "capabilities": ["completion"], "source": "built-in"}]
    for at, name in enumerate(names):
        row = {"name": name, "size": 640_000_000, "capabilities": ["completion"], "modified_at": f"2026-01-0{9 - at}"}
        desk.daemon.rows.append(row | {"source": "foreign"} | changes)


async def test_enter_twice_asks_a_model_that_is_here(desk: Any) -> None:
    have(desk, "qwen3:0.6b", "gemma3:4b")
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "› qwen3:0.6b")
        await desk.see(pilot, "Enter chats")
        screen = desk.seen(desk.app)
        assert screen.index("qwen3:0.6b") < screen.index("gemma3:4b") < screen.index("ask tiny")
        await pilot.press("enter")
        await desk.see(pilot, "This is qwen3:0.6b.")
        await desk.see(pilot, "› What can you help me with?")
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        model, messages = desk.daemon.questions[0]
        assert (model, messages[0]["content"]) == ("qwen3:0.6b", "What can you help me with?")


async def test_tiny_is_one_key_away_as_well(desk: Any) -> None:
    have(desk, "qwen3:0.6b")
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "› qwen3:0.6b")
        await pilot.press("down")
        await desk.see(pilot, "› Tell me a story about a fox.")
        await desk.see(pilot, "Enter asks")
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        assert desk.daemon.questions[0][0] == "tiny"


async def test_what_was_marked_before_the_list_came_stays_marked(desk: Any) -> None:
    have(desk, "qwen3:0.6b")
    async with desk.open(SIZE) as pilot:
        await pilot.press("down")
        await desk.see(pilot, "› What is 3 + 4?")
        desk.daemon.publish()
        await desk.see(pilot, "qwen3:0.6b")
        assert "› What is 3 + 4?" in desk.seen(desk.app)


async def test_an_offer_can_be_clicked_and_a_later_new_chat_offers_none(desk: Any) -> None:
    have(desk, "qwen3:0.6b", "gemma3:4b")
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "gemma3:4b")
        lines = desk.seen(desk.app).split("\n")
        await pilot.click(offset=(8, next(y for y, text in enumerate(lines) if "gemma3:4b" in text)))
        await desk.see(pilot, "This is gemma3:4b.")
        await pilot.press("ctrl+n")
        await desk.see(pilot, "This is gemma3:4b.")
        assert "other models" not in desk.seen(desk.app)


async def test_models_that_do_not_chat_are_not_offered(desk: Any) -> None:
    have(desk, "all-minilm:l6-v2", capabilities=["embedding"])
    desk.daemon.rows.append({"name": "base", "size": 1, "capabilities": ["completion"], "source": "foreign"})
    desk.daemon.templates["base"] = ""
    desk.daemon.rows.append({"name": "gone", "size": 1, "capabilities": ["completion"], "source": "foreign"})
    desk.daemon.templates["gone"] = ModelNotFound("gone")
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await desk.until(pilot, lambda: desk.daemon.n_shown == 2)
        await desk.see(pilot, "● ready")
        assert "other models" not in desk.seen(desk.app)
        assert "› Tell me a story about a fox." in desk.seen(desk.app)
