"""Pictures of the screens. After a wanted change run pytest on this file with `--snapshot-update`, and look at them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot

from localrun.snapshot import KvRunRow, PullRow
from localrun.tui.rates import Sample
from localrun.tui.widgets.prompt import Prompt
from tests.tui.conftest import NOW_S

NO_OUTPUT: dict[str, Any] = {"output_tokens": 0, "tokens_per_s": None, "tokens_per_s_avg": None, "ttft_s": None}

SMALL = (80, 24)
SIZES = {"80x24": SMALL, "100x30": (100, 30), "160x48": (160, 48)}

# Two requests that share a beginning, kept prefixes behind it.
KV: dict[str, Any] = {
    "kv_cells_used": 5200, "kv_cells_shared": 441, "ram_cache_bytes": 48_000_000, "disk_cache_bytes": 310_000_000,
    "prompt_tokens_total": 90_000, "cached_tokens_total": 56_700, "ram_restored_tokens_total": 12_000,
    "kv_runs": [
        KvRunRow(0, 441, "req_6a7b8c9d0e1f", True), KvRunRow(441, 900, "req_6a7b8c9d0e1f", False),
        KvRunRow(1341, 600, "req_5f0c1d2e3a4b", False), KvRunRow(1941, 900, "req_0a1b2c3d4e5f", False),
        KvRunRow(2841, 2359, None, False),
    ],
}  # fmt: skip

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
        desk.row("req_5f0c1d2e3a4b", client="tui-4821", lane="interactive", age_s=2.4, slot=1,
                 drafted_tokens=30, accepted_tokens=22),
        desk.row("req_6a7b8c9d0e1f", client="zed", api="/v1/chat/completions", age_s=8.1, output_tokens=311, slot=0,
                 drafted_tokens=180, accepted_tokens=151),
        desk.row("req_0a1b2c3d4e5f", "prefill", client="continue", lane="batch", prompt_tokens=2981,
                 computed_tokens=1341, cached_tokens=441, age_s=1.2, slot=2, **NO_OUTPUT),
        desk.row("req_1b2c3d4e5f6a", "queued", client="open-webui", prompt_tokens=None, cached_tokens=None,
                 age_s=0.4, slot=None, **NO_OUTPUT),
        desk.row("req_2c3d4e5f6a7b", "done", client="aider", age_s=31.0, output_tokens=1204, finish_reason="stop",
                 drafted_tokens=640, accepted_tokens=640, speedup=2.13),
        desk.row("req_3d4e5f6a7b8c", "failed", client="curl", age_s=50.0, error="the engine of 'tiny' ended"),
    ]  # fmt: skip


def _calm(pilot: Pilot[Any]) -> None:
    """A blinking cursor would be in one picture and not in the next."""
    for box in pilot.app.screen.query("Prompt, Input"):
        box.cursor_blink = False


async def _chat(desk: Any, pilot: Pilot[Any]) -> None:
    _calm(pilot)
    desk.daemon.publish()
    await pilot.press("enter")
    desk.daemon.say(ANSWER, thinking="A story was asked for. It should be short.")
    desk.daemon.end_answer(speedup=2.1)
    await desk.see(pilot, "● done")
    desk.daemon.publish(desk.row(desk.request_id, "done", output_tokens=87))
    await desk.see(pilot, "TTFT")
    await pilot.press(*"and then?")


async def _answering(desk: Any, pilot: Pilot[Any]) -> None:
    _calm(pilot)
    desk.daemon.publish()
    await pilot.press("enter")
    desk.daemon.say("Once upon a time")
    await desk.see(pilot, "Once upon")
    desk.daemon.publish(desk.row(desk.request_id, output_tokens=40))
    await desk.see(pilot, "42.0 tok/s")
    await pilot.press(*"/")
    await desk.see(pilot, "begin a new chat")


async def _beside(desk: Any, pilot: Pilot[Any]) -> None:
    await _chat(desk, pilot)
    await pilot.press("f5")
    await desk.see(pilot, "Type below")


async def _first_run(desk: Any, pilot: Pilot[Any]) -> None:
    _calm(pilot)
    desk.daemon.publish(engines=())
    await desk.see(pilot, "the first question")


async def _chats(desk: Any, pilot: Pilot[Any]) -> None:
    history = desk.app.session.history
    titles = (
        "Why is the sky blue?",
        "狐狸的故事：很久很久以前，在一棵老橡樹下，住著一隻小小的狐狸",
        "A 🦊 and a bear",
        "x" * 90,
    )
    for number, title in enumerate(titles):
        chat = history.begin("tiny" if number % 2 else "hf.co/org/a-long-name-GGUF", now_s=NOW_S)
        history.add(chat.id, None, "user", title, now_s=NOW_S + 3600 * number)
    desk.daemon.publish()
    await desk.see(pilot, "● ready")
    await pilot.press("ctrl+l")
    await desk.see(pilot, "Why is the sky")
    _calm(pilot)


async def _monitor(desk: Any, pilot: Pilot[Any]) -> None:
    for time in range(480):
        decode = 140 + 60 * math.sin(time / 30)
        prefill = 900.0 if time % 120 < 20 else 0.0
        desk.app.session.rates.add(Sample(time / 4, decode, prefill))
    await pilot.press("f2")
    loading = type(desk.engine)(model="qwen3:0.6b", pid=4400, state="loading")
    desk.daemon.publish(*_requests(desk), time_s=120.0, engines=(replace(desk.engine, **KV), loading))
    await desk.see(pilot, "qwen3:0.6b")
    await pilot.press("down")
    await desk.see(pilot, "req_5f0c1d2e…")


async def _kv_map(desk: Any, pilot: Pilot[Any]) -> None:
    await _monitor(desk, pilot)
    await pilot.press("v")
    await desk.see(pilot, "KV cells of")


async def _request(desk: Any, pilot: Pilot[Any]) -> None:
    await _monitor(desk, pilot)
    await pilot.press("enter")
    await desk.see(pilot, "between tokens")


async def _empty_monitor(desk: Any, pilot: Pilot[Any]) -> None:
    await pilot.press("f2")
    desk.daemon.publish(engines=())
    await desk.see(pilot, "No requests")


async def _models(desk: Any, pilot: Pilot[Any]) -> None:
    desk.daemon.pull_rows = [
        PullRow(
            model="qwen3:4b", state="pulling", status="pulling", total_bytes=2_500_000_000,
            completed_bytes=500_000_000, bytes_per_s=10_000_000, eta_s=150.0,
        )
    ]  # fmt: skip
    desk.daemon.publish()
    await desk.see(pilot, "●")
    await pilot.press("f3")
    await desk.see(pilot, "loaded")
    await desk.see(pilot, "2m 30s left")
    _calm(pilot)


async def _model_detail(desk: Any, pilot: Pilot[Any]) -> None:
    await _models(desk, pilot)
    await pilot.press("ctrl+g")
    await desk.see(pilot, "on this machine")


async def _logs(desk: Any, pilot: Pilot[Any]) -> None:
    desk.daemon.publish()
    await pilot.press("f4")
    for number in range(1, 31):
        desk.daemon.log(number, f"request {number} of zed: 512 prompt tokens, 480 cached, 87 out", "debug")
    desk.daemon.log(31, "llama_context: n_ctx_per_seq (4096) is less than the model was trained with " * 3, "warning")
    desk.daemon.log(32, "the engine of 'tiny' ended with signal 11", "error", "localrun.server")
    await desk.see(pilot, "signal 11")


async def _help(desk: Any, pilot: Pilot[Any]) -> None:
    desk.daemon.publish()
    await desk.see(pilot, "● ready")
    _calm(pilot)
    await pilot.press("f10")
    await desk.see(pilot, "Everywhere")


async def _lost(desk: Any, pilot: Pilot[Any]) -> None:
    _calm(pilot)
    desk.retry_delays_s[:] = [3600.0]
    desk.daemon.go_away()
    await desk.see(pilot, "No daemon at")
    await pilot.press(*"hello", "enter")
    await desk.see(pilot, "The answer failed")
    await desk.until(pilot, lambda: pilot.app.screen.query_one(Prompt).text == "hello")


SCREENS = (
    _chat, _answering, _beside, _first_run, _chats, _monitor, _kv_map, _request, _empty_monitor, _models,
    _model_detail, _logs, _help, _lost,
)  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("before", SCREENS, ids=lambda before: before.__name__.strip("_"))
def test_screen(desk: Any, snap_compare: Any, before: Callable[[Any, Pilot[Any]], Awaitable[None]], size: str) -> None:
    assert snap_compare(desk.app, terminal_size=SIZES[size], run_before=lambda pilot: before(desk, pilot))


@pytest.mark.parametrize("theme", ["localrun-light", "ansi-dark"])
@pytest.mark.parametrize("before", [_chat, _monitor], ids=["chat", "monitor"])
def test_other_colours(
    desk: Any, snap_compare: Any, before: Callable[[Any, Pilot[Any]], Awaitable[None]], theme: str
) -> None:
    async def in_theme(pilot: Pilot[Any]) -> None:
        desk.app.theme = theme
        await before(desk, pilot)

    assert snap_compare(desk.app, terminal_size=SIZES["100x30"], run_before=in_theme)
