"""What API keys used, over the monitor."""

from __future__ import annotations

from typing import Any

from localrun.snapshot import UsageRow
from localrun.tui.screens.details import UsageScreen
from localrun.tui.widgets.tables import RequestTable


async def test_use_by_key_then_by_day_and_in_other_days(desk: Any) -> None:
    desk.daemon.used = [
        UsageRow(name="zed", requests=12, prompt_tokens=1_204_000, cached_tokens=800_000, output_tokens=31_000),
        UsageRow(name="notes", requests=3, prompt_tokens=600, cached_tokens=0, output_tokens=90),
    ]
    async with desk.open((100, 30)) as pilot:
        await pilot.press("f2")
        await desk.until(pilot, lambda: desk.app.screen.query(RequestTable))
        await pilot.press("u")
        await desk.see(pilot, "since 2026-10-25")
        lines = [text.strip("│ ").split() for text in desk.seen(desk.app).split("\n")]
        assert ["zed", "12", "1,204,000", "800,000", "31,000"] in lines
        assert ["together", "15", "1,204,600", "800,000", "31,090"] in lines
        desk.daemon.used = []
        await pilot.press("b")
        await desk.see(pilot, "Use by day")
        await desk.see(pilot, "Nothing was counted")
        await pilot.press("d")
        await desk.until(pilot, lambda: desk.daemon.usages == [("key", 30), ("day", 30), ("day", 365)])
        await pilot.press("escape")
        await desk.until(pilot, lambda: not isinstance(desk.app.screen, UsageScreen))


async def test_a_daemon_that_is_away_says_so(desk: Any) -> None:
    async with desk.open((100, 30)) as pilot:
        await pilot.press("f2")
        await desk.until(pilot, lambda: desk.app.screen.query(RequestTable))
        desk.daemon.is_up = False
        await pilot.press("u")
        await desk.see(pilot, "no daemon answers")
