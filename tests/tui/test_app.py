"""Modes, help, themes."""

from __future__ import annotations

from typing import Any

import pytest
from textual.visual import visualize

from localrun.errors import DaemonUnreachable, InvalidKey
from localrun.tui.app import LocalrunApp
from localrun.tui.keys import KEYS, key_of
from localrun.tui.preferences import DARK, LIGHT
from localrun.tui.widgets.top_bar import Banner


async def test_f_keys_go_round_and_keep_the_prompt(desk: Any) -> None:
    async with desk.open((80, 24)) as pilot:
        await pilot.press(*"draft", "f2")
        await desk.see(pilot, "decode tok/s")
        await pilot.press("f1")
        await desk.see(pilot, "draft")


@pytest.mark.parametrize("keys", [("f10",), ("ctrl+g",), ("f2", "question_mark")])
async def test_help_says_the_keys_and_the_commands(desk: Any, keys: tuple[str, ...]) -> None:
    async with desk.open((80, 140)) as pilot:
        await pilot.press(*keys)
        await desk.see(pilot, "stop the answer")
        await desk.see(pilot, "/export [FILE]")
        await pilot.press("escape")
        await desk.until(pilot, lambda: "/export [FILE]" not in desk.seen(desk.app))


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("place", ["f1", "f2", "f4"])
async def test_no_key_at_the_bottom_is_cut_and_the_top_says_where_one_is(desk: Any, width: int, place: str) -> None:
    whole = {f"{key_of(name, {}).split()[0]} {key.label}" for name, key in KEYS.items()}
    async with desk.open((width, 24)) as pilot:
        await pilot.press(place)
        await desk.see(pilot, "^g Help")
        keys = desk.seen(desk.app).split("\n")[-1].strip().split("  ")
        assert set(keys) <= whole
        assert len(keys) >= 4
        names = {"f1": "F1 Chat", "f2": "F2 Monitor", "f4": "F4 Logs"}
        top = desk.seen(desk.app).split("\n")[0]
        assert names[place] in top
        assert top.endswith("tiny ●")


async def test_there_is_a_way_around_the_keys_that_terminals_keep_and_the_footer_says_it(desk: Any) -> None:
    async with desk.open((80, 24)) as pilot:
        await desk.see(pilot, "^s Monitor")
        assert "^g Help" in desk.seen(desk.app)
        assert "^t Chat" not in desk.seen(desk.app)
        await pilot.press(*"draft", "ctrl+s")
        await desk.until(pilot, lambda: desk.app.current_mode == "monitor")
        await desk.see(pilot, "^t Chat")
        assert "^s Monitor" not in desk.seen(desk.app)
        await pilot.press("f4")
        await desk.see(pilot, "^t Chat")
        await desk.see(pilot, "^s Monitor")
        await pilot.press("ctrl+t")
        await desk.see(pilot, "draft")


async def test_a_question_mark_can_be_typed(desk: Any) -> None:
    async with desk.open((80, 24)) as pilot:
        await pilot.press("w", "question_mark")
        await desk.see(pilot, "w?")


async def test_ctrl_r_reconnects_at_once(desk: Any) -> None:
    desk.retry_delays_s[:] = [3600.0]
    desk.daemon.is_up = False
    async with desk.open((80, 24)) as pilot:
        await desk.see(pilot, "No daemon at")
        desk.daemon.is_up = True
        desk.daemon.publish()
        await pilot.press("ctrl+r")
        await desk.see(pilot, "● ready")


async def test_another_machine_is_named_and_its_refusals_are_shown(desk: Any) -> None:
    other = type(desk)(url="https://studio.local:11434")
    other.daemon.is_up = False
    other.daemon.refusal = InvalidKey("this API key was revoked [/] [b]now")
    async with other.open((110, 24)) as pilot:
        await other.see(pilot, "Not connected, retrying; ^r now: this API key was revoked [/] [b]now")
        banner = other.app.screen.query_one(Banner)
        shown_by_mouse = visualize(banner, banner.tooltip)  # as Tooltip does, which tests have none of
        assert str(shown_by_mouse) == "this API key was revoked [/] [b]now"
        await other.see(pilot, "○ not connected")
        await other.see(pilot, "It runs on studio.local.")
        assert "No daemon" not in other.seen(other.app)
        other.daemon.is_up = True
        other.daemon.publish()
        await pilot.press("ctrl+r")
        await other.see(pilot, "● ready")
        assert other.n_starts == 0


async def test_both_themes_and_the_terminals_own_colours_draw_every_screen(desk: Any) -> None:
    async with desk.open((80, 24)) as pilot:
        desk.daemon.publish(desk.row("a"))
        for theme in (DARK.name, LIGHT.name, "ansi-dark", "ansi-light"):
            desk.app.theme = theme
            for key, text in (("f1", "Tell me a story"), ("f2", "by arrival"), ("f3", "Enter chooses"), ("escape", "")):
                await pilot.press(key)
                await desk.see(pilot, text)


@pytest.mark.parametrize(("term", "theme"), [("linux", "ansi-dark"), ("xterm-256color", DARK.name)])
async def test_a_terminal_of_sixteen_colours_keeps_its_own(
    desk: Any, monkeypatch: pytest.MonkeyPatch, term: str, theme: str
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("COLORTERM")
    app = LocalrunApp("http://127.0.0.1:1", connect=desk.daemon.connect)
    async with app.run_test():
        assert app.theme == theme


async def test_the_client_is_named_after_the_process_and_closed(desk: Any) -> None:
    closed: list[bool] = []

    async def leave(*exc_info: object) -> None:
        closed.append(True)

    desk.daemon.__class__.__aexit__, kept = leave, desk.daemon.__class__.__aexit__
    try:
        async with desk.open((80, 24)):
            assert desk.daemon.name.startswith("tui-")
    finally:
        desk.daemon.__class__.__aexit__ = kept
    assert closed == [True]


async def test_ctrl_r_starts_a_daemon_that_has_ended_and_says_why_it_cannot(desk: Any) -> None:
    desk.retry_delays_s[:] = [3600.0]
    desk.refusal = DaemonUnreachable("the disk is full")
    desk.daemon.is_up = False
    async with desk.open((100, 30)) as pilot:
        await desk.see(pilot, "^r starts one")
        await pilot.press("ctrl+r")
        await desk.see(pilot, "the disk is full")
        desk.refusal = None
        desk.daemon.publish()
        await pilot.press("ctrl+r")
        await desk.see(pilot, "● ready")
        assert desk.n_starts == 2


@pytest.mark.parametrize("size", [(1, 1), (2, 40), (5, 3)])
async def test_a_terminal_of_hardly_a_column_ends_nothing(desk: Any, size: tuple[int, int]) -> None:
    """Panes are made so narrow for a moment."""
    async with desk.open(size) as pilot:
        for key in ("x", "f2", "f3", "escape", "f4", "f1", "ctrl+g", "escape"):
            await pilot.press(key)
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert desk.app.screen.size == (80, 24)
        await pilot.resize_terminal(*size)
        await pilot.pause()
        assert desk.app.is_running
