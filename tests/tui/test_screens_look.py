"""Pictures of the screens. After a wanted change run pytest on this file with `--snapshot-update`, and look at them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from localrun.tui.rate_series import Sample
from localrun.tui.widgets.prompt import Prompt

NO_OUTPUT: dict[str, Any] = {"output_tokens": 0, "tokens_per_s": None, "tokens_per_s_avg": None, "ttft_s": None}

SMALL, LARGE = (80, 24), (120, 36)

ANSWER = """## A fox

Once upon a time a **small fox** lived under an old oak. Every morning it

1. walked to the *river*,
2. counted the fish,

and went home:

```python
def count(fish: list[str]) -> int:
    return len(fish)
```
"""


def _requests(desk: Any) -> list[Any]:
    return [
        desk.row("req_5f0c1d2e3a4b", client="tui-4821", lane="interactive", age_s=2.4, slot=1),
        desk.row("req_6a7b8c9d0e1f", client="zed", api="/v1/chat/completions", age_s=8.1, output_tokens=311, slot=0),
        desk.row("req_0a1b2c3d4e5f", "prefill", client="continue", lane="batch", prompt_tokens=2981,
                 computed_tokens=1341, cached_tokens=441, age_s=1.2, slot=2, **NO_OUTPUT),
        desk.row("req_1b2c3d4e5f6a", "queued", client="open-webui", prompt_tokens=None, cached_tokens=None,
                 age_s=0.4, slot=None, **NO_OUTPUT),
        desk.row("req_2c3d4e5f6a7b", "done", client="aider", age_s=31.0, output_tokens=1204, finish_reason="stop"),
        desk.row("req_3d4e5f6a7b8c", "failed", client="curl", age_s=50.0, error="the engine of 'tiny' ended"),
    ]  # fmt: skip


def _calm(pilot: Pilot[Any]) -> None:
    """A blinking cursor would be in one picture and not in the next."""
    for prompt in pilot.app.query(Prompt):
        prompt.cursor_blink = False


def _chat(desk: Any) -> Callable[[Pilot[Any]], Awaitable[None]]:
    async def before(pilot: Pilot[Any]) -> None:
        _calm(pilot)
        desk.daemon.publish()
        await pilot.press("enter")
        desk.daemon.say(ANSWER)
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        desk.daemon.publish(desk.row(desk.request_id, "done", output_tokens=87))
        await desk.see(pilot, "TTFT")
        await pilot.press(*"and then?")

    return before


def _monitor(desk: Any) -> Callable[[Pilot[Any]], Awaitable[None]]:
    async def before(pilot: Pilot[Any]) -> None:
        for time in range(480):
            decode = 140 + 60 * math.sin(time / 30)
            prefill = 900.0 if time % 120 < 20 else 0.0
            desk.app.session.rates.add(Sample(time / 4, decode, prefill))
        await pilot.press("f2")
        loading = {"model": "qwen3:0.6b", "pid": 4400, "state": "loading"}
        desk.daemon.publish(*_requests(desk), time_s=120.0, engines=(desk.engine, type(desk.engine)(**loading)))
        await desk.see(pilot, "qwen3:0.6b")
        await pilot.press("down")
        await desk.see(pilot, "req_5f0c1d2e…")

    return before


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x36"])
def test_chat(desk: Any, snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(desk.app, terminal_size=size, run_before=_chat(desk))


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x36"])
def test_monitor(desk: Any, snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(desk.app, terminal_size=size, run_before=_monitor(desk))


def test_first_run(desk: Any, snap_compare: Any) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        _calm(pilot)
        desk.daemon.publish(engines=())
        await desk.see(pilot, "the model loads with the first question")

    assert snap_compare(desk.app, terminal_size=SMALL, run_before=before)


def test_model_picker(desk: Any, snap_compare: Any) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        _calm(pilot)
        desk.daemon.publish()
        await desk.see(pilot, "● ready")
        await pilot.press("f3")
        await desk.see(pilot, "loaded")
        pilot.app.screen.query_one("Input").cursor_blink = False

    assert snap_compare(desk.app, terminal_size=SMALL, run_before=before)


def test_failed_answer_and_lost_daemon(desk: Any, snap_compare: Any) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        _calm(pilot)
        desk.app._feed._retry_delays_s = (3600.0,)
        desk.daemon.go_away()
        await desk.see(pilot, "No daemon at")
        await pilot.press(*"hello", "enter")
        await desk.see(pilot, "The answer failed")
        await desk.until(pilot, lambda: pilot.app.screen.query_one(Prompt).text == "hello")

    assert snap_compare(desk.app, terminal_size=SMALL, run_before=before)
