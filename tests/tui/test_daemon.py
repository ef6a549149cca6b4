"""One event stream, kept open across the daemon's absences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from localrun.tui.daemon import Feed

_PATIENCE_S = 60


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the condition is any, there is nothing to be told by
            await asyncio.sleep(0.005)


async def test_snapshots_are_handed_on_and_a_lost_daemon_is_tried_again(desk: Any) -> None:
    taken: list[float] = []
    lost: list[str] = []
    feed = Feed(
        open=desk.daemon.events, take=lambda s: taken.append(s.time_s), on_lost=lost.append, retry_delays_s=(0.001,)
    )
    task = asyncio.create_task(feed.run())
    desk.daemon.publish(time_s=1.0)
    desk.daemon.publish(time_s=2.0)
    await _until(lambda: taken == [1.0, 2.0])
    desk.daemon.go_away()
    await _until(lambda: desk.daemon.connections >= 4)
    assert lost[0] == "the daemon went away"
    assert "localrun serve" in lost[-1]
    desk.daemon.is_up = True
    desk.daemon.publish(time_s=3.0)
    await _until(lambda: taken == [1.0, 2.0, 3.0])
    task.cancel()


async def test_the_pause_grows_and_can_be_cut_short(desk: Any) -> None:
    desk.daemon.is_up = False
    lost: list[str] = []
    feed = Feed(open=desk.daemon.events, take=lambda _: None, on_lost=lost.append, retry_delays_s=(0.001, 3600.0))
    task = asyncio.create_task(feed.run())
    # The second pause is an hour long: without help nothing more happens.
    await _until(lambda: len(lost) == 2)
    await asyncio.sleep(0.05)
    assert len(lost) == 2
    feed.retry_now()
    await _until(lambda: len(lost) == 3)
    task.cancel()
