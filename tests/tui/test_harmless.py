"""Every screen shows texts from elsewhere, and none of them reaches the terminal as a command."""

from __future__ import annotations

from typing import Any

import msgspec

from localrun.errors import BadRequest
from localrun.snapshot import PullRow, Snapshot, UsageRow
from localrun.tui.widgets.prompt import Prompt
from localrun.visible import visible
from tests.poisoned import POISON, attacks, poisoned

SIZE = (160, 60)
# The beginning of the poison, as it is seen.
SEEN = visible(POISON)[:9]


def _check(desk: Any) -> None:
    text = "\n".join(strip.text for strip in desk.app.screen._compositor.render_strips())
    assert SEEN in text
    assert not attacks(text), text


async def test_chat(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        call = {"function": {"name": f"tool{POISON}", "arguments": {f"a{POISON}": POISON}}}
        desk.daemon.say(
            f"text {POISON} `{POISON}` [{POISON}](http://a/)\n\n```{POISON}\n{POISON}\n```\n\n| {POISON} |\n|---|\n"
        )
        desk.daemon.say(thinking=f"thought {POISON}", tool_calls=[call])
        await desk.see(pilot, f"text {SEEN}")
        _check(desk)
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        _check(desk)
        await pilot.press(*"two", "enter")
        desk.daemon.fail_answer(BadRequest(f"refused {POISON}"))
        await desk.see(pilot, f"refused {SEEN}")
        _check(desk)


async def test_what_was_typed_and_pasted(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.app.screen.query_one(Prompt).text = f"question {POISON}"
        await pilot.press("enter")
        desk.daemon.say("answer")
        await desk.see(pilot, f"question {SEEN}")
        _check(desk)


async def test_monitor_request_and_usage(desk: Any) -> None:
    row = desk.row("req_1", "failed", error="the engine ended")
    snapshot = desk.snapshot_of(row, desk.row("req_2"))
    desk.daemon.used = [UsageRow(name=f"key{POISON}", requests=1, prompt_tokens=1, cached_tokens=1, output_tokens=1)]
    async with desk.open((SIZE[0] + 20, SIZE[1])) as pilot:  # a poisoned row has a node, too
        await pilot.press("f2")
        desk.daemon.publish_snapshot(msgspec.convert(poisoned(msgspec.to_builtins(snapshot)), Snapshot))
        await desk.see(pilot, f"zed{SEEN}")
        _check(desk)
        await pilot.press("enter")
        await desk.see(pilot, "route")
        _check(desk)
        await pilot.press("escape", "u")
        await desk.see(pilot, f"key{SEEN}")
        _check(desk)


async def test_models_and_logs(desk: Any) -> None:
    desk.daemon.rows = [row | {"name": f"{row['name'].removesuffix(':latest')}{POISON}"} for row in desk.daemon.rows]
    desk.daemon.capabilities = [f"capability{POISON}"]
    desk.daemon.pull_rows = [PullRow(model=f"pulled{POISON}", state="pulling", status=f"status{POISON}")]
    async with desk.open(SIZE) as pilot:
        await pilot.press("f3")
        await desk.see(pilot, f"qwen3:0.6b{SEEN}")
        _check(desk)
        await pilot.press("ctrl+g")
        await desk.see(pilot, f"capability{SEEN}")
        _check(desk)
        await pilot.press("escape", "escape", "f4")
        desk.daemon.log(1, f"line {POISON}", source=f"model{POISON}")
        await desk.see(pilot, f"line {SEEN}")
        _check(desk)
