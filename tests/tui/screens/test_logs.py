"""The log: followed, narrowed, and gone on with."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from textual.widgets import RichLog

from localrun.tui.screens.logs import LINES_PER_TURN

SIZE = (100, 24)


async def _open(desk: Any, pilot: Any) -> None:
    await pilot.press("f4")
    await desk.see(pilot, "level debug and above")


async def test_lines_come_with_their_level_and_source(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _open(desk, pilot)
        desk.daemon.log(1, "llama_context: n_ctx = 4096")
        desk.daemon.log(2, "the engine died", "error", "localrun.server.engines.link")
        await desk.see(pilot, "n_ctx = 4096")
        await desk.see(pilot, "the engine died")
        row = next(text for text in desk.seen(desk.app).split("\n") if "the engine died" in text)
        assert row.split()[1:3] == ["error", "engines.link"]


async def test_level_and_words_narrow_and_come_off_again(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _open(desk, pilot)
        desk.daemon.log(1, "loading weights")
        desk.daemon.log(2, "weights are large", "warning")
        desk.daemon.log(3, "disk is full", "warning")
        await desk.see(pilot, "disk is full")
        await pilot.press("l", "l")
        await desk.see(pilot, "level warning and above")
        assert "loading weights" not in desk.seen(desk.app)
        await pilot.press("slash", *"weights", "enter")
        await desk.until(pilot, lambda: "disk is full" not in desk.seen(desk.app))
        assert "weights are large" in desk.seen(desk.app)
        await pilot.press("escape", "l", "l")
        await desk.see(pilot, "loading weights")


async def test_words_may_look_like_markup(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _open(desk, pilot)
        desk.daemon.log(1, "[/] is a path here")
        desk.daemon.log(2, "nothing of the kind")
        await pilot.press("slash", *"[/]")
        await desk.see(pilot, "with “[/]”")
        await desk.until(pilot, lambda: "nothing of the kind" not in desk.seen(desk.app))
        assert "[/] is a path here" in desk.seen(desk.app)


async def test_keys_are_read_while_many_lines_are_drawn(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written, turns = [0], [0]
    write = RichLog.write

    def counted(*given: Any, **options: Any) -> RichLog:
        written[0] += 1
        return write(*given, **options)

    async def watch() -> None:
        while True:
            turns.append(written[0])
            await asyncio.sleep(0)

    monkeypatch.setattr(RichLog, "write", counted)
    async with desk.open(SIZE) as pilot:
        await _open(desk, pilot)
        watcher = asyncio.create_task(watch())
        for number in range(1, 201):
            desk.daemon.log(number, f"line number {number}")
        await desk.see(pilot, "line number 200")
        await pilot.press("slash", "e")
        await desk.until(pilot, lambda: written[0] == 400)
        await desk.see(pilot, "line number 200")
        watcher.cancel()
    assert max(after - before for before, after in pairwise(turns)) <= LINES_PER_TURN


async def test_it_goes_on_where_it_was(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _open(desk, pilot)
        desk.daemon.log(7, "before")
        await desk.see(pilot, "before")
        desk.daemon.end_log()
        await desk.until(pilot, lambda: desk.daemon.log_starts == [0, 7])
        desk.daemon.log(8, "of a new daemon")
        await desk.see(pilot, "of a new daemon")
        assert "before" in desk.seen(desk.app)


async def test_control_characters_of_a_log_do_not_reach_the_terminal(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _open(desk, pilot)
        desk.daemon.log(1, "red \x1b[31mtext")
        await desk.see(pilot, "red ␛[31mtext")
