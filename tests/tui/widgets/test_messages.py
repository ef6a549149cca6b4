"""The growing answer, at its edges."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.widgets import Collapsible, Markdown, Static

from localrun.tui.widgets import messages
from localrun.tui.widgets.messages import SHOWN_THOUGHT_CHARACTERS, AnswerMessage


class _Window(App[None]):
    def compose(self) -> ComposeResult:
        yield AnswerMessage()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was written on the screen, each text as soon as its write begins."""
    begun: list[str] = []
    append = Markdown.append
    monkeypatch.setattr(Markdown, "append", lambda markdown, text: begun.append(text) or append(markdown, text))
    monkeypatch.setattr(messages, "WRITES_PER_S", 100)
    return begun


async def test_an_answer_that_ends_while_a_write_is_under_way_is_whole(desk: Any, writes: list[str]) -> None:
    app = _Window()
    async with app.run_test(size=(60, 12)) as pilot:
        answer = app.query_one(AnswerMessage)
        answer.append("Your name ")
        while not writes:  # noqa: ASYNC110 - during a longer pause the write would end
            await asyncio.sleep(0)
        await answer.finish("Your name is Zelda.", "8 tokens")
        answer.append("never shown")
        await pilot.pause(0.1)
        assert [text.strip() for text in desk.seen(app).split("\n") if text.strip()] == [
            "Your name is Zelda.",
            "8 tokens",
        ]


async def test_many_pieces_are_few_writes(writes: list[str]) -> None:
    app = _Window()
    async with app.run_test(size=(60, 12)) as pilot:
        answer = app.query_one(AnswerMessage)
        for number in range(500):
            answer.append(f"{number} ")
        await pilot.pause(0.2)
        assert "".join(writes) == "".join(f"{number} " for number in range(500))
        assert len(writes) <= 5


async def test_a_code_fence_that_came_in_pieces_is_one_block(desk: Any, writes: list[str]) -> None:
    app = _Window()
    text = "Look:\n\n```python\nx = 1\ny = 2\n```\n\nDone."
    async with app.run_test(size=(60, 14)) as pilot:
        answer = app.query_one(AnswerMessage)
        for number, character in enumerate(text, start=1):
            answer.append(character)
            await desk.until(pilot, lambda n_written=number: len(writes) == n_written)
        await answer.finish(text, "")
        await pilot.pause()
        assert [line.strip() for line in desk.seen(app).split("\n") if line.strip()] == [
            "Look:",
            "x = 1",
            "y = 2",
            "Done.",
        ]


async def test_only_web_links_are_opened(monkeypatch: Any) -> None:
    opened: list[str] = []
    app = _Window()
    monkeypatch.setattr(app, "open_url", opened.append)
    async with app.run_test(size=(60, 14)) as pilot:
        answer = app.query_one(AnswerMessage)
        markdown = answer.query_one(Markdown)
        for href in ("https://example.org/", "file:///etc/passwd", "javascript:x"):
            answer.on_markdown_link_clicked(Markdown.LinkClicked(markdown, href))
        await pilot.pause()
    assert opened == ["https://example.org/"]


async def test_long_thinking_is_drawn_when_it_is_open_its_end_while_it_grows_and_all_of_it_at_last(desk: Any) -> None:
    app = _Window()
    thought = " ".join(f"{number}" for number in range(20_000))
    async with app.run_test(size=(60, 12)) as pilot:
        answer = app.query_one(AnswerMessage)
        thinking = answer.query_one(Collapsible)
        drawn = thinking.query_one("Contents > Static", Static)
        answer.think(thought)
        await desk.until(pilot, lambda: "20,000 words" in str(thinking.title))
        assert str(drawn.content) == ""
        answer.action_unfold()
        await pilot.pause()
        assert str(drawn.content) == f"…{thought[-SHOWN_THOUGHT_CHARACTERS:]}"
        answer.think(" and")
        await desk.until(pilot, lambda: str(drawn.content).endswith(" and"))
        answer.action_unfold()
        await answer.finish("The answer.", "")
        answer.action_unfold()
        await pilot.pause()
        assert str(drawn.content) == f"{thought} and"


async def test_what_looks_like_markup_is_seen_while_it_streams_and_afterwards(desk: Any, writes: list[str]) -> None:
    app = _Window()
    text = "Use Vec<1> and <2>,\nso 3*4*5.\n\n<answer>\n6\n</answer>\n\n[7]: 8\n\n| <9> |\n|---|\n\n"
    text += "<style>\nbody {}\n\nrest \u2028 10"
    async with app.run_test(size=(60, 40)) as pilot:
        answer = app.query_one(AnswerMessage)
        for at in range(0, len(text), 7):
            answer.append(text[at : at + 7])
            await desk.until(pilot, lambda n_written=at: sum(map(len, writes)) >= n_written)
        await desk.until(pilot, lambda: "10" in desk.seen(app))
        assert re.findall(r"\d+", desk.seen(app)) == list(map(str, range(1, 11)))
        await answer.finish(text, "")
        await pilot.pause()
        assert re.findall(r"\d+", desk.seen(app)) == list(map(str, range(1, 11)))
