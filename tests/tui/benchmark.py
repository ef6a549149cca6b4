"""What the interface costs: `python -m tests.tui.benchmark` prints its figures, measured in this process.

- opening a chat of 200,000 tokens: from the choice until its end stands on the screen;
- the monitor with 32 streaming requests, and with none: processor time as a part of one core;
- from a key to the screen, 95th percentile, while 8 answers stream into 8 chats, one of them visible.

The terminal is textual's headless one and the daemon a generator, so no model and no terminal takes part. A key's time
is from its event to the first picture that is drawn with its letter in the prompt.

Does not: judge; it prints.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from textual import events
from textual.pilot import Pilot
from textual.screen import Screen

from localrun.client import ChatPiece
from localrun.snapshot import (
    Aggregate,
    EngineRow,
    KvRunRow,
    LogLine,
    RequestRow,
    RequestState,
    Snapshot,
    SystemRow,
)
from localrun.tui.app import LocalrunApp
from localrun.tui.daemon import Replay
from localrun.tui.history import open_history
from localrun.tui.screens.chat import ChatScreen
from localrun.tui.widgets.prompt import Prompt

CHAT_TOKENS = 200_000
_TOKENS_PER_MESSAGE = 500
STREAMS_IN_MONITOR = 32
MONITOR_S = 8.0
CHATS = 8
TOKENS_PER_S = 40
KEYS = "the quick brown fox jumps over the lazy dog and goes on for a while until there are enough of these keys "
_SIZE = (120, 40)


class _Daemon(Replay):
    """Answers every chat with words for ever, and shows `n_requests` running ones; has nothing else to it."""

    def __init__(self, n_requests: int) -> None:
        super().__init__(Path())
        self._n_requests = n_requests
        self._n_output = 0

    async def chat(
        self,
        model: str,
        messages: list[dict[str, Any]],
        *,
        options: dict[str, Any] | None = None,
        think: bool | str | None = None,
        lane: str = "default",
        tools: list[dict[str, Any]] | None = None,
    ) -> AsyncGenerator[ChatPiece, None]:
        for number in range(1_000_000):
            await asyncio.sleep(1 / TOKENS_PER_S)
            yield ChatPiece(text="\n\n" if number % 60 == 59 else f"word{number} ", request_id="r")

    async def events(self, hz: int = 4) -> AsyncGenerator[Snapshot, None]:
        while True:
            self._n_output += 10
            yield self._snapshot()
            await asyncio.sleep(1 / hz)

    async def logs(self, since: int = 0) -> AsyncGenerator[LogLine, None]:
        await asyncio.Event().wait()
        yield LogLine(1, 0.0, "info", "", "")

    def _snapshot(self) -> Snapshot:
        rows = [
            RequestRow(
                id=f"req_{number:04}", client=f"client-{number}", api="/v1/chat/completions", model="tiny",
                lane="default", state=RequestState.DECODE, slot=number, prompt_tokens=512, computed_tokens=512,
                cached_tokens=400, output_tokens=self._n_output + number, tokens_per_s=12.0 + self._n_output % 7,
                tokens_per_s_avg=12.5, ttft_s=0.3, itl_p50_s=0.08, age_s=self._n_output / 10,
            )
            for number in range(self._n_requests)
        ]  # fmt: skip
        runs = [KvRunRow(number * 1000, 600, f"req_{number:04}", number % 3 == 0) for number in range(self._n_requests)]
        engine = EngineRow(
            model="tiny", pid=1, state="ready", n_ctx=4096, slots=32, slots_busy=self._n_requests, kv_cells=32768,
            kv_cells_used=600 * self._n_requests, step_s=0.08, target_itl_s=0.14, kv_runs=runs,
        )  # fmt: skip
        decode_tokens_per_s = 400.0 + self._n_output % 50 if rows else 0.0
        aggregate = Aggregate(decode_tokens_per_s=decode_tokens_per_s, running=self._n_requests)
        return Snapshot(
            time_s=time.time(),
            uptime_s=1.0,
            version="",
            aggregate=aggregate,
            engines=[engine],
            requests=rows,
            system=SystemRow(cpu_percent=time.time() * 10 % 100),
        )


class _Watched(LocalrunApp):
    """Knows when a picture has been drawn."""

    _drawn = asyncio.Event()

    def _display(self, screen: Screen[Any], renderable: Any) -> None:
        super()._display(screen, renderable)
        self._drawn.set()

    async def press_s(self, key: str) -> float:
        """Seconds from a letter's key to the first picture after it is in the prompt."""
        prompt = self.screen.query_one(Prompt)
        before = len(prompt.text)
        began_s = time.perf_counter()
        self.post_message(events.Key(key, key))
        while True:
            self._drawn.clear()
            await self._drawn.wait()
            if len(prompt.text) > before:
                return time.perf_counter() - began_s


def _app(n_requests: int, first: str, history_file: Path | None = None) -> LocalrunApp:
    daemon = _Daemon(n_requests)
    return LocalrunApp("http://127.0.0.1:1", connect=lambda *_: daemon, first=first, history_file=history_file)


async def open_long_chat_s() -> float:
    """Seconds from the choice of a long chat until its last words are laid out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chats.db")
        history = open_history(path).history
        chat, parent_id = history.begin("tiny", now_s=1.0), None
        for number in range(CHAT_TOKENS // _TOKENS_PER_MESSAGE):
            role = "assistant" if number % 2 else "user"
            text = f"**message {number}** " + "word " * _TOKENS_PER_MESSAGE
            parent_id = history.add(chat.id, parent_id, role, text, now_s=2.0).id
        history.close()
        app = _app(1, "chat", path)
        async with app.run_test(size=_SIZE) as pilot:
            screen = app.screen
            assert isinstance(screen, ChatScreen)
            began_s = time.perf_counter()
            await screen.open_chat(chat.id)
            await pilot.pause()
            return time.perf_counter() - began_s


async def monitor_share(n_requests: int) -> float:
    """The part of one core that the monitor takes with so many streaming requests."""
    app = _app(n_requests, "monitor")
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause(1.0)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.sleep(MONITOR_S)
        return (time.process_time() - cpu_s) / (time.perf_counter() - began_s)


async def key_latencies_s() -> list[float]:
    """Seconds from each key to its letter on the screen, while answers stream into several chats."""
    daemon = _Daemon(CHATS)
    app = _Watched("http://127.0.0.1:1", connect=lambda *_: daemon)
    async with app.run_test(size=_SIZE) as pilot:
        for _ in range(CHATS):
            await _ask(pilot)
        return [await app.press_s(key) for key in KEYS.replace(" ", "")]


async def _ask(pilot: Pilot[None]) -> None:
    await pilot.press("ctrl+n")
    await pilot.press("x", "enter")
    await pilot.pause(0.2)


def main() -> None:
    opened_s = asyncio.run(open_long_chat_s())
    print(f"a chat of {CHAT_TOKENS:,} tokens opens in {opened_s:.2f} s")
    for n_requests in (STREAMS_IN_MONITOR, 0):
        share = asyncio.run(monitor_share(n_requests))
        print(f"the monitor with {n_requests} streaming requests takes {share:.1%} of one core")
    latencies_s = sorted(asyncio.run(key_latencies_s()))
    p95_s = statistics.quantiles(latencies_s, n=20)[-1]
    print(
        f"a key is on the screen after {1000 * statistics.median(latencies_s):.0f} ms (median), {1000 * p95_s:.0f} ms "
        f"(p95) while {CHATS} chats stream {TOKENS_PER_S} tokens/s each"
    )


if __name__ == "__main__":
    main()
