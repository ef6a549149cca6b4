"""The app against a real daemon with fake engines: what the fakes elsewhere promise is what it does."""

from __future__ import annotations

import asyncio
from typing import Any

from localrun.snapshot import RequestState
from localrun.tui.app import LocalrunApp
from localrun.tui.widgets.prompt import Prompt
from tests.daemon import running_daemon

# Slow enough to be stopped in the middle, on any machine.
_STEP_MS = "100"


async def test_chat_stop_watch_cancel_and_lose_the_daemon(desk: Any) -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS=_STEP_MS) as daemon:
        app = desk.app = LocalrunApp(daemon.url, retry_delays_s=(0.1,))
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            await desk.see(pilot, "the model loads with the first question")
            await pilot.press(*"hello", "enter")
            await desk.see(pilot, "● decoding")
            await desk.see(pilot, "TTFT")
            await desk.see(pilot, "cached 0")
            await pilot.press("escape")
            await desk.see(pilot, "● stopped")
            assert app.session.snapshot is not None
            await desk.until(pilot, lambda: _states(app) == [RequestState.CANCELLED])

            body = {"model": "tiny", "prompt": "go on", "max_tokens": 500, "ignore_eos": True}
            other = asyncio.create_task(asyncio.to_thread(daemon.post, "/v1/completions", body))
            await pilot.press("f2")
            await desk.see(pilot, "decode      python-httpx")
            # The selection is still on the request that was there first.
            await pilot.press("up", "x")
            await desk.see(pilot, "Cancelled the request of")
            assert (await other).status_code == 499
            assert _states(app)[-1] is not RequestState.DONE

            await pilot.press("f1")
            await pilot.pause()
            await pilot.press(*"draft")
            daemon.stop()
            await desk.see(pilot, "No daemon at")
            assert app.screen.query_one(Prompt).text == "draft"


def _states(app: LocalrunApp) -> list[RequestState]:
    return [row.state for row in app.session.snapshot.requests] if app.session.snapshot else []
